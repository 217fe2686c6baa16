"""Prints the results as one table: TTT on, off and the base, by task and length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...files.results import Results
from .answers import Settings
from .prompt import Task

VARIANTS = ("on", "off", "base")


def cells(
    settings: Settings, names: Sequence[str], results: Results
) -> Iterator[tuple[Task, int, dict[str, dict[str, Any]]]]:
    """Yields each task at each length, with the kept result of each variant in `names`."""
    for task, length in settings.cells():
        yield task, length, {name: results.known[f"{name}-{task.name}-{length}"] for name in names}


def differences(kept: dict[str, dict[str, Any]]) -> list[float]:
    """Returns scores with TTT on minus scores with TTT off, sample by sample."""
    return [on - off for on, off in zip(kept["on"]["scores"], kept["off"]["scores"], strict=True)]


def render(
    result: dict[str, Any], cell: Callable[[Any, str], str], beside: Sequence[str], legend: str
) -> str:
    """Returns the table in plain text.

    Args:
        result: rows and averages, with a value per column.
        cell: formats a value of a column.
        beside: names of columns to the left of the variants.
        legend: text below the table.
    """

    def line(name: str, values: dict[str, Any]) -> str:
        return name.ljust(20) + "".join(cell(values[column], column).rjust(16) for column in columns)

    names = [*beside, *(name for name in VARIANTS if name in result["averages"][0])]
    columns = [*names, "difference"]
    heads = [*names, "on - off"]
    lines = []
    for average in result["averages"]:
        lines.append(f"{average['length']:,} tokens".ljust(20) + "".join(head.rjust(16) for head in heads))
        rows = [row for row in result["rows"] if row["length"] == average["length"]]
        lines += [line(row["task"], row) for row in rows]
        lines.append(line(f"average of {len(rows)}", average) + "\n")
    return "\n".join([*lines, legend])

"""The results as one table: TTT on, off and the base, by task and length, with paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...files.results import Results
from .answers import Settings
from .scoring import average, mean_of

VARIANTS = ("on", "off", "base")


def table(settings: Settings, names: Sequence[str], results: Results) -> dict[str, Any]:
    """{rows: task by task, averages: length by length}; `difference` is on - off, paired by sample."""
    rows = []
    for task, length in settings.cells():
        cells = {name: results.known[f"{name}-{task.name}-{length}"] for name in names}
        row: dict[str, Any] = {"task": task.name, "length": length, "tokens": cells["on"]["tokens"]}
        row |= {name: mean_of(cell["scores"]) for name, cell in cells.items()}
        row["difference"] = mean_of([on - off for on, off in zip(cells["on"]["scores"], cells["off"]["scores"], strict=True)])
        rows.append(row)
    averages = []
    for length in settings.lengths:
        of_length = [row for row in rows if row["length"] == length]
        columns = {name: average([row[name] for row in of_length]) for name in (*names, "difference")}
        averages.append({"length": length, **columns})
    return {"rows": rows, "averages": averages}


def render(result: dict[str, Any]) -> str:
    """The table in plain text."""

    def line(name: str, values: dict[str, Any]) -> str:
        return name.ljust(20) + "".join(_cell(values[column], column).rjust(16) for column in columns)

    names = [name for name in VARIANTS if name in result["averages"][0]]
    columns = [*names, "difference"]
    heads = [*names, "on - off"]
    lines = []
    for mean in result["averages"]:
        lines.append(f"{mean['length']:,} tokens".ljust(20) + "".join(head.rjust(16) for head in heads))
        for row in result["rows"]:
            if row["length"] == mean["length"]:
                lines.append(line(row["task"], row))
        lines.append(line(f"average of {mean['on']['n']}", mean) + "\n")
    lines.append(f"scores of 100, ± standard error over {result['samples']} samples a task, seed {result['seed']}")
    return "\n".join(lines)


def _cell(value: dict[str, Any], column: str) -> str:
    sign = "+" if column == "difference" else ""
    error = "" if value["stderr"] is None else f" ± {value['stderr']:4.1f}"
    return f"{value['mean']:{sign}.1f}{error}"

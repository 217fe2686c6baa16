"""RULER's table: mean scores with standard errors, by task and length, with paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...files.results import Results
from ..long_context import table as tables
from ..long_context.answers import Settings
from .scoring import average, mean_of


def table(settings: Settings, names: Sequence[str], results: Results) -> dict[str, Any]:
    """Returns {rows, averages}: by task, and by length; `difference` is on - off, paired by sample."""
    rows = []
    for task, length, kept in tables.cells(settings, names, results):
        row: dict[str, Any] = {"task": task.name, "length": length, "tokens": kept["on"]["tokens"]}
        row |= {name: mean_of(cell["scores"]) for name, cell in kept.items()}
        row["difference"] = mean_of(tables.differences(kept))
        rows.append(row)
    averages = []
    for length in settings.lengths:
        of_length = [row for row in rows if row["length"] == length]
        columns = {name: average([row[name] for row in of_length]) for name in (*names, "difference")}
        averages.append({"length": length, **columns})
    return {"rows": rows, "averages": averages}


def render(result: dict[str, Any]) -> str:
    """Returns the table in plain text."""
    legend = (
        f"scores of 100, ± standard error over {result['samples']} samples per task, seed {result['seed']}"
    )
    return tables.render(result, _cell, (), legend)


def _cell(value: dict[str, Any], column: str) -> str:
    sign = "+" if column == "difference" else ""
    error = "" if value["stderr"] is None else f" ± {value['stderr']:4.1f}"
    return f"{value['mean']:{sign}.1f}{error}"

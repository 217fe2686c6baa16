"""BABILong's table: the share of right answers with its Wilson interval, by task and length.

Two more columns hold the shares that guesses would reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from ...files.results import Results
from ...reports.statistics import Mean, wilson
from ..long_context import table as tables
from ..long_context.answers import Settings


def table(settings: Settings, names: Sequence[str], results: Results) -> dict[str, Any]:
    """Returns {rows, averages}: by task, and by length over the samples of all tasks.

    The columns are:

    - a variant's name: {share, low, high, n}.
    - `chance`: expected share of a random choice among the options.
    - `shallow`: share of the best of three rules: always the option stated first, last, or most often.
    - `difference`: on - off, paired by sample, {mean, stderr, n}.
    """
    rows: list[dict[str, Any]] = []
    pools: dict[int, list[dict[str, dict[str, Any]]]] = {length: [] for length in settings.lengths}
    for task, length, kept in tables.cells(settings, names, results):
        rows.append(
            {"task": task.name, "length": length, "tokens": kept["on"]["tokens"], **_columns([kept], names)}
        )
        pools[length].append(kept)
    averages = [{"length": length, **_columns(pool, names)} for length, pool in pools.items()]
    return {"rows": rows, "averages": averages}


def _columns(cells: Sequence[dict[str, dict[str, Any]]], names: Sequence[str]) -> dict[str, Any]:
    """Returns the columns over all samples of some cells."""
    columns: dict[str, Any] = {
        "chance": mean(1 / len(options) for kept in cells for options in kept["on"]["options"])
    }
    answers = [
        (answer, guesses)
        for kept in cells
        for (answer,), guesses in zip(kept["on"]["answers"], kept["on"]["guesses"], strict=True)
    ]
    columns["shallow"] = max(mean(rule == answer for rule, answer in picks) for picks in _by_rule(answers))
    for name in names:
        hits = [score > 0 for kept in cells for score in kept[name]["scores"]]
        columns[name] = {**wilson(hits), "n": len(hits)}
    columns["difference"] = vars(
        Mean.of(difference / 100 for kept in cells for difference in tables.differences(kept))
    )
    return columns


def _by_rule(answers: Sequence[tuple[str, Sequence[str]]]) -> list[list[tuple[str, str]]]:
    """Returns, rule by rule, the guess and the right answer of each sample."""
    return [[(guesses[rule], answer) for answer, guesses in answers] for rule in range(len(answers[0][1]))]


def render(result: dict[str, Any]) -> str:
    """Returns the table in plain text, in percent."""
    legend = (
        f"right answers in %, with Wilson's 95 % intervals, of {result['samples']} samples per task, seed "
        f"{result['seed']}; on - off with its standard error"
    )
    return tables.render(result, _cell, ("chance", "shallow"), legend)


def _cell(value: Any, column: str) -> str:
    if column in ("chance", "shallow"):
        return f"{100 * value:.0f}"
    if column == "difference":
        error = "" if value["stderr"] is None else f" ± {100 * value['stderr']:.1f}"
        return f"{100 * value['mean']:+.1f}{error}"
    return f"{100 * value['share']:.0f} ({100 * value['low']:.0f} to {100 * value['high']:.0f})"

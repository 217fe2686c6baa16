"""The table of results: TTT on, TTT off and the base, by length, task and metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from ...files.results import Results
from ...reports.statistics import Mean, wilson

_GUESSES = ("chance", "shallow")


def table(cells: Iterable[Any], names: Sequence[str], results: Results) -> dict[str, Any]:
    """Returns {rows, averages}: by task, length and metric; by family and length.

    The columns are:

    - a name of `names`: {mean, stderr, n}. If every score is 0 or 1, {low, high} is Wilson's 95 % interval.
    - `difference`: on - off, paired by sample, {mean, stderr, n}.
    - `chance`: expected score of a random choice among a sample's options, if it has options.
    - `shallow`: score of the best of three rules: always the option stated first, last, or most often.

    Averages weight all tasks of a family equally.

    Args:
        cells: the `Cell`s of the run.
        names: names of the columns.
        results: the results of all cells.
    """
    rows: list[dict[str, Any]] = []
    asked: dict[tuple[str, int], list[tuple[dict[str, Any], list[Any]]]] = {}
    for cell in cells:
        kept = {name: results.known[f"{name}-{cell.name}"] for name in names}
        samples = kept["on"]["samples"]
        for metric in kept["on"]["metrics"]:
            values = {name: kept[name]["metrics"][metric] for name in names}
            row: dict[str, Any] = {"task": cell.task, "length": cell.length, "metric": metric}
            row |= {"higher_is_better": values["on"]["higher_is_better"]}
            row |= _compared(values, len(samples))
            if cell.length is not None:
                row |= {"tokens": [sample["tokens"] for sample in samples], **_guessed(samples)}
                asked.setdefault((cell.task.partition("_")[0], cell.length), []).append((row, samples))
            rows.append(row)
    averages = []
    for (family, length), found in asked.items():
        if len(found) > 1:
            average: dict[str, Any] = {"family": family, "length": length, "tasks": len(found)}
            columns = {name: _average([row[name] for row, _ in found]) for name in (*names, "difference")}
            guessed = _guessed([sample for _, samples in found for sample in samples])
            averages.append({**average, **columns, **guessed})
    return {"rows": rows, "averages": averages}


def _compared(values: dict[str, dict[str, Any]], count: int) -> dict[str, Any]:
    """Returns the columns of a row from each column's {value, scores}."""
    columns = {
        name: vars(Mean(one["value"], None, count)) if one["scores"] is None else _mean(one["scores"])
        for name, one in values.items()
    }
    on, off = values["on"], values["off"]
    difference = Mean(on["value"] - off["value"], None, count)
    if on["scores"] is not None and off["scores"] is not None:
        difference = Mean.of(a - b for a, b in zip(on["scores"], off["scores"], strict=True))
    return {**columns, "difference": vars(difference)}


def _mean(scores: Sequence[float]) -> dict[str, Any]:
    return {**vars(Mean.of(scores)), **(_interval(sum(scores), len(scores)) if {*scores} <= {0, 1} else {})}


def _interval(hits: float, n: int) -> dict[str, float]:
    found = wilson([number < round(hits) for number in range(n)])
    return {"low": found["low"], "high": found["high"]}


def _average(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean of tasks with equally many samples; its error comes from the samples of each task."""
    middle, n = mean(cell["mean"] for cell in cells), sum(cell["n"] for cell in cells)
    errors = [cell["stderr"] for cell in cells]
    stderr = None if None in errors else sum(error**2 for error in errors) ** 0.5 / len(cells)
    interval = _interval(middle * n, n) if all("low" in cell for cell in cells) else {}
    return {**vars(Mean(middle, stderr, n)), **interval}


def _guessed(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the scores of guesses, which need no model; empty for samples without options."""
    if not samples[0]["options"]:
        return {}
    right = [[guess == sample["answers"][0] for guess in sample["guesses"]] for sample in samples]
    return {
        "chance": mean(1 / len(sample["options"]) for sample in samples),
        "shallow": max(sum(rule) / len(samples) for rule in zip(*right, strict=True)),
    }


def render(result: dict[str, Any]) -> str:
    """Returns the table in plain text."""
    names = [name for name in ("on", "off", "base") if name in result["rows"][0]]
    lines = []
    for length in dict.fromkeys(row["length"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["length"] == length]
        averages = [row for row in result["averages"] if row["length"] == length]
        beside = [name for name in _GUESSES if any(name in row for row in rows)]
        head = "tasks of lm-eval" if length is None else f"{length:,} tokens"
        shown = [[head, *beside, *names, "on - off"]]
        for row in rows + averages:
            cells = [_shown(row.get(name), name) for name in (*beside, *names, "difference")]
            shown.append([_title(row), *cells])
        widths = [max(map(len, column)) + 2 for column in zip(*shown, strict=True)]
        lines += [
            first.ljust(widths[0]) + "".join(map(str.rjust, cells, widths[1:])) for first, *cells in shown
        ]
        lines.append("")
    return "\n".join(
        [*lines, "shares with Wilson's 95 % intervals, other means and differences with ± standard error"]
    )


def _title(row: dict[str, Any]) -> str:
    if "family" in row:
        return f"average of {row['tasks']} {row['family']}"
    if row["length"] is not None:
        return row["task"]
    return f"{row['task']} {row['metric']}{' (lower is better)' if row['higher_is_better'] is False else ''}"


def _shown(value: Any, column: str) -> str:
    if value is None or isinstance(value, float):
        return "" if value is None else f"{value:.3f}"
    text = f"{value['mean']:{'+' if column == 'difference' else ''}.3f}"
    if "low" in value:
        return f"{text} ({value['low']:.2f} to {value['high']:.2f})"
    return text if value["stderr"] is None else f"{text} ± {value['stderr']:.3f}"

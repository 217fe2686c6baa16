"""Draws the plots of an evaluation: loss by position, by document, by context, and recall of facts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError, how_to_install

_COLORS = {
    "on": "#2a6fdb",
    "off": "#8a8f98",
    "base": "#444b55",
    "mismatched": "#d9822b",
    "state_only": "#3a9d5d",
    "bm25": "#8e5bd0",
    "full": "#111111",
}
_NAMES = {
    "on": "TTT on",
    "off": "TTT off",
    "base": "base",
    "mismatched": "another document's state",
    "state_only": "fast weights alone",
    "bm25": "BM25 retrieval, TTT off",
    "full": "full attention, TTT off",
}


def require_plots() -> None:
    """Raises InPlaceTTTError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise InPlaceTTTError(f"plots need matplotlib; {how_to_install('plots')}, or leave out --out.")


def write_plots(folder: Path, result: dict[str, Any]) -> list[str]:
    """Draws the results of an evaluation into PNG files.

    Args:
        folder: folder of the files.
        result: JSON object of the evaluation.

    Returns:
        Names of the files.

    Raises:
        InPlaceTTTError: if matplotlib is not installed.
    """
    require_plots()
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    def save(figure: Figure, name: str) -> str:
        figure.tight_layout()
        figure.savefig(folder / name, dpi=130)
        pyplot.close(figure)
        return name

    written = [save(_positions(result), "positions.png"), save(_documents(result), "documents.png")]
    if result.get("contexts"):
        written.append(save(_contexts(result), "contexts.png"))
    if result.get("facts"):
        written.append(save(_facts(result["facts"]), "facts.png"))
    return written


def _positions(result: dict[str, Any]) -> Any:
    """Draws each reading's loss minus the loss with TTT off, by position, with the standard error."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rows = result["positions"]
    middle = [(row["start"] + row["stop"]) / 2 for row in rows]
    for name in ("on", "mismatched", "base"):
        points = [
            (x, height)
            for x, row in zip(middle, rows, strict=True)
            if (height := _beyond_off(row, name)) is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=3, color=_COLORS[name], label=_NAMES[name]
            )
    low, high = (
        [row["difference"]["mean"] + sign * (row["difference"]["stderr"] or 0.0) for row in rows]
        for sign in (-1, 1)
    )
    axes.fill_between(middle, low, high, color=_COLORS["on"], alpha=0.15, linewidth=0)
    axes.axhline(0, color=_COLORS["off"], linewidth=1)
    axes.set(
        xlabel="position in the document (tokens)",
        ylabel="loss minus TTT off (nats per token)",
        title=_headline(result),
    )
    axes.legend(frameon=False)
    return figure


def _beyond_off(row: dict[str, Any], name: str) -> float | None:
    """Returns a reading's loss minus the loss with TTT off, over the same documents; None if unknown."""
    if name == "mismatched":
        return None if row["generic_gain"] is None else row["generic_gain"]["mean"]
    return None if row[name] is None else row[name] - row["off"]


def _headline(result: dict[str, Any]) -> str:
    difference, own = result["difference"], result["document_gain"]
    return f"on − off {_with_error(difference)}" + (
        "" if own is None else f", of which the document's own {_with_error(own)}"
    )


def _with_error(value: dict[str, Any]) -> str:
    return f"{value['mean']:+.4f}" + ("" if value["stderr"] is None else f" ± {value['stderr']:.4f}")


def _documents(result: dict[str, Any]) -> Any:
    """Draws each document's differences, sorted by on - off."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    kinds = {"on − off": "on_minus_off", "own − mismatched": "own_minus_mismatched"}
    documents = sorted(result["documents"], key=lambda d: d["on_minus_off"])
    for (label, key), color in zip(kinds.items(), (_COLORS["on"], _COLORS["mismatched"]), strict=True):
        values = [d[key] for d in documents if d[key] is not None]
        if values:
            better = sum(value < 0 for value in values)
            axes.plot(
                values,
                marker="o",
                markersize=4,
                color=color,
                label=f"{label}: below zero in {better} of {len(values)}",
            )
    axes.axhline(0, color=_COLORS["off"], linewidth=1)
    axes.locator_params(axis="x", integer=True)
    axes.set(
        xlabel="documents, the most helped first",
        ylabel="difference (nats per token)",
        title="Difference by document",
    )
    axes.legend(frameon=False)
    return figure


def _facts(facts: dict[str, Any]) -> Any:
    """Draws shares of right answers with their intervals.

    The first two plots show verbatim questions by distance, the third every kind of question at the first
    distance.
    """
    from matplotlib import pyplot

    figure, (exact, chosen, kinds) = pyplot.subplots(
        1, 3, figsize=(15, 4), sharey=True, width_ratios=(1, 1, 1.5)
    )
    first = next(iter(facts["readings"].values()))[0]
    names = [kind for kind, its in first["kinds"].items() if "multiple_choice" in its]
    for number, (name, rows) in enumerate(facts["readings"].items()):
        how = {"marker": "o", "markersize": 4, "capsize": 2, "color": _COLORS[name]}
        for axes, measure in ((exact, "exact_match"), (chosen, "multiple_choice")):
            _with_intervals(
                axes,
                [row["distance"] for row in rows],
                [row["kinds"]["verbatim"][measure] for row in rows],
                **how,
            )
        places = [place + 0.12 * (number - 2) for place in range(len(names))]
        shares = [rows[0]["kinds"][kind]["multiple_choice"] for kind in names]
        _with_intervals(kinds, places, shares, label=_NAMES[name], **how, linestyle="none")
    chances = [1 / first["kinds"][kind]["options"] for kind in names]
    dotted = {"colors": "#b0b4ba", "linestyles": ":", "linewidth": 1}
    chosen.axhline(1 / first["kinds"]["verbatim"]["options"], color="#b0b4ba", linestyle=":", linewidth=1)
    kinds.hlines(
        chances,
        [place - 0.4 for place in range(len(names))],
        [place + 0.4 for place in range(len(names))],
        **dotted,
    )
    for axes, measure in ((exact, "exact_match"), (chosen, "multiple_choice")):
        axes.set_xscale("log", base=2)
        axes.set(
            xlabel="tokens between facts and questions",
            title=f"{measure.replace('_', ' ')}, verbatim questions",
        )
    exact.set(ylabel="share of answers", ylim=(-0.02, 1.02))
    kinds.set_xticks(range(len(names)), names)
    kinds.set(title=f"multiple choice, after {first['distance']:,} tokens (dotted: chance)")
    kinds.legend(frameon=False)
    return figure


def _with_intervals(axes: Any, at: list[float], shares: list[dict[str, float]], **how: Any) -> None:
    errors = [[x["share"] - x["low"] for x in shares], [x["high"] - x["share"] for x in shares]]
    axes.errorbar(at, [x["share"] for x in shares], yerr=errors, **how)


def _contexts(result: dict[str, Any]) -> Any:
    """Draws the perplexity of the last block against the number of context tokens before it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rows = result["contexts"]
    for name in ("on", "off", "base"):
        points = [(row["context"], row[f"{name}_perplexity"]) for row in rows if f"{name}_perplexity" in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=_COLORS[name], label=_NAMES[name])
    axes.set(
        xlabel="context before the block (tokens)",
        ylabel="perplexity of the block",
        title="The same block after more context",
    )
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    return figure

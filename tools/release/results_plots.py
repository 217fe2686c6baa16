"""Draw the three plots of docs/results/README.md from the raw results beside it.

    python tools/release/results_plots.py            # writes the plots
    python tools/release/results_plots.py --check    # exits with 1 if a plot shows other numbers

Each PNG holds the numbers that it shows as JSON text. The check compares them with the raw results, so it does not
depend on fonts or on the version of matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from PIL import Image

from inplace_ttt.reports.statistics import wilson

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
RAW = RESULTS / "cpu-2026-11"
TEXT = "Description"
"""The PNG's text chunk with the numbers."""

# Colors of Okabe and Ito, which stay apart without red-green vision. Markers differ too.
BLUE, ORANGE, GREEN, PURPLE, BLACK, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#222222", "#8a8f98"

MEMORY = {
    "SmolLM2-135M, attention window of 256": "memory.json",
    "Gemma 3 270M, its own attention": "memory-gemma-3-270m.json",
}
"""Panel of the first plot: its file."""
RULES = {
    "gradient": "loss gradient,\nuntrained",
    "ridge": "ridge,\ntrained",
    "ridge, eta 0.3": "ridge,\ntrained",
    "paper": "paper's rule,\ntrained",
    "paper, eta 0.004": "paper's rule,\ntrained",
    "LoRA, eta 0": "LoRA,\nno writes",
}
"""Rules of the first plot, from its top: the label of each. A rule that a file lacks is left out of its panel."""
WITHOUT_WRITES = {"LoRA, eta 0"}
POSITIONS = {"gradient": ("loss gradient, untrained", ORANGE, "s"), "ridge": ("ridge, trained", BLUE, "o")}
"""Rules of the second plot: label, color and marker."""
TITLES = {"on - off": "total: on − off", "document gain": "document gain: own − another's state"}
"""Panels of the second plot."""
BROKEN = 12_288
"""From this token on, SmolLM2-135M itself fails: it was trained to 8,192 positions."""
FACTS = {
    "with writes, SmolLM2-135M": ("facts.json", "gated", "on", BLUE, "o", "-"),
    "with writes, Gemma 3 270M": ("facts-gemma-3-270m.json", "gated", "on", PURPLE, "D", "-"),
    "untrained base + BM25, SmolLM2": ("facts.json", "untrained", "bm25", GREEN, "^", "--"),
    "writes off, SmolLM2": ("facts.json", "gated", "off", BLACK, "x", ":"),
}
"""Lines of the third plot: file, run, reading, color, marker and line style."""
KINDS = ("verbatim", "paraphrased")


def gain_by_rule() -> dict[str, Any]:
    """Returns for each panel and rule three pairs (mean, standard error), in nats per token.

    The two parts of `total` are `document`, the gain from the document's own writes, and `generic`, the rest. Without
    writes, `total` is the change against the base. `full attention` is the gain of the untrained base by full attention.
    """
    panels: dict[str, Any] = {}
    for title, file in MEMORY.items():
        rows = {row["rule"]: row for row in _raw(file)["rules"]}
        panels[title] = {"rules": {rule: _parts(rule, rows[rule]) for rule in RULES if rule in rows}}
        seeds = [seed for row in rows.values() for seed in row["seeds"] if "full_attention" in seed]
        if seeds:
            panels[title]["full attention"] = _rounded(seeds[0]["full_attention"]["off"] - seeds[0]["off"])
    return panels


def gain_by_position() -> dict[str, Any]:
    """Returns for each rule the middles of its stretches of text, on - off, and document gain."""
    rows = {row["rule"]: row for row in _raw("memory.json")["rules"]}
    lines = {}
    for rule in POSITIONS:
        found = next(seed["far_beyond"] for seed in rows[rule]["seeds"] if "far_beyond" in seed)["positions"]
        lines[rule] = {
            "token": [(place["start"] + place["stop"]) / 2 for place in found],
            "on - off": [_rounded(place["difference"]) for place in found],
            "document gain": [_rounded(place["difference"] - place["generic_gain"]) for place in found],
        }
    return lines


def facts_by_distance() -> dict[str, Any]:
    """Returns for each kind of question and line the distances, shares, and ends of 95 % intervals."""
    return {kind: {label: _answers(kind, *line[:3]) for label, line in FACTS.items()} for kind in KINDS}


def draw_gain_by_rule(data: dict[str, Any]) -> Figure:
    """Draws horizontal bars, one panel per model."""
    heights = [len(panel["rules"]) for panel in data.values()]
    figure, panels = pyplot.subplots(
        len(data), figsize=(7.6, 1.5 + 0.62 * sum(heights)), height_ratios=heights, layout="constrained"
    )
    parts = (
        ("total", "total: on − off", BLACK),
        ("generic", "generic gain: also with another document's writes", ORANGE),
        ("document", "document gain: from the document's own writes", BLUE),
    )
    for axes, (title, panel) in zip(panels, data.items(), strict=True):
        rules = list(panel["rules"])
        for offset, (part, label, color) in zip((-0.26, 0, 0.26), parts, strict=True):
            means, errors = zip(*(panel["rules"][rule][part] for rule in rules), strict=True)
            places = [place + offset for place in range(len(rules))]
            axes.barh(places, means, 0.24, xerr=errors, label=label, color=color, ecolor=GREY, capsize=2.5)
        if "full attention" in panel:
            axes.axvline(
                panel["full attention"], color=GREEN, linestyle="--", label="base with full attention"
            )
        axes.axvline(0, color=GREY, linewidth=1)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.set_yticks(range(len(rules)), [RULES[rule] for rule in rules])
        axes.set(title=title, ylim=(len(rules) - 0.5, -0.5))
    panels[-1].set_xlabel("change of loss (nats per token; further left is better)")
    _legend(figure, panels[0], 2)
    return figure


def draw_gain_by_position(data: dict[str, Any]) -> Figure:
    """Draws two panels of lines: on - off, and document gain."""
    figure, panels = pyplot.subplots(1, 2, figsize=(8.4, 3.9), sharex=True, sharey=True, layout="constrained")
    for axes, key in zip(panels, TITLES, strict=True):
        for rule, (label, color, marker) in POSITIONS.items():
            axes.plot(data[rule]["token"], data[rule][key], color=color, marker=marker, label=label)
        axes.axvspan(BROKEN, 16_384, color=GREY, alpha=0.25, linewidth=0, label="the base itself fails here")
        axes.axhline(0, color=GREY, linewidth=1)
        lowest = min(value for rule in POSITIONS for value in data[rule][key])
        axes.text(BROKEN + 150, -0.685, f"lowest: {lowest:.2f}", fontsize=8)
        axes.set(
            xlabel="position in the text (tokens)", xlim=(0, 16_384), ylim=(-0.7, 0.05), title=TITLES[key]
        )
        axes.set_xticks(range(0, 16_385, 4096), [f"{token:,}" for token in range(0, 16_385, 4096)])
    panels[0].set_ylabel("nats per token (lower is better)")
    _legend(figure, panels[0], 3)
    return figure


def draw_facts_by_distance(data: dict[str, Any]) -> Figure:
    """Draws two panels of lines: verbatim and paraphrased questions."""
    figure, panels = pyplot.subplots(1, 2, figsize=(8.4, 4.1), sharex=True, sharey=True, layout="constrained")
    for axes, kind in zip(panels, KINDS, strict=True):
        for place, (label, (*_, color, marker, style)) in enumerate(FACTS.items()):
            line = data[kind][label]
            beside = 1 + 0.05 * (place - 1.5)  # so that error bars do not cover each other
            errors = [
                [share - low for share, low in zip(line["share"], line["low"], strict=True)],
                [high - share for share, high in zip(line["share"], line["high"], strict=True)],
            ]
            axes.errorbar(
                [distance * beside for distance in line["distance"]],
                line["share"],
                yerr=errors,
                color=color,
                marker=marker,
                linestyle=style,
                capsize=3,
                label=label,
            )
        distances = sorted({distance for line in data[kind].values() for distance in line["distance"]})
        axes.set(
            xscale="log",
            xlabel="tokens between fact and question",
            ylim=(-0.03, 1),
            title=f"{kind} questions",
        )
        axes.set_xticks(distances, [f"{distance:,}" for distance in distances])
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("share of exact matches")
    _legend(figure, panels[0], 2)
    return figure


PLOTS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Figure]]] = {
    "gain-by-rule.png": (gain_by_rule, draw_gain_by_rule),
    "gain-by-position.png": (gain_by_position, draw_gain_by_position),
    "facts-by-distance.png": (facts_by_distance, draw_facts_by_distance),
}
"""File in docs/results: the functions that collect its numbers and draw them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the plots, or with --check compares their numbers.

    Returns:
        Exit code: 1 if `--check` is given and a plot is not current, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a plot shows other numbers"
    )
    check, stale = parser.parse_args(arguments).check, []
    for name, (collect, draw) in PLOTS.items():
        file, data = RESULTS / name, collect()
        if not check:
            figure = draw(data)
            figure.savefig(file, dpi=120, metadata={TEXT: json.dumps(data)})
            pyplot.close(figure)
        elif numbers_in(file) != data:
            stale.append(file)
    for file in stale:
        print(f"{file} does not show the raw results; run this command without --check.")
    return int(bool(stale))


def numbers_in(file: Path) -> dict[str, Any] | None:
    """Returns the numbers that a plot holds; None if the file is missing or holds none."""
    if not file.exists():
        return None
    with Image.open(file) as image:
        text = image.info.get(TEXT)
    return None if text is None else json.loads(text)


def _raw(file: str) -> dict[str, Any]:
    return json.loads((RAW / file).read_text(encoding="utf-8"))


def _rounded(value: float) -> float:
    return round(value, 4)


def _parts(rule: str, row: dict[str, Any]) -> dict[str, list[float]]:
    total, document = row["gain"], row["document_gain"]
    generic = (
        {**total, "mean": total["mean"] - document["mean"]} if rule in WITHOUT_WRITES else row["generic_gain"]
    )
    return {
        part: [_rounded(found["mean"]), _rounded(max(found["stderr_documents"], found["stderr_seeds"]))]
        for part, found in (("total", total), ("generic", generic), ("document", document))
    }


def _answers(kind: str, file: str, run: str, reading: str) -> dict[str, list[float]]:
    hits: dict[int, list[bool]] = {}
    for place in _places(_raw(file)["runs"][run].values(), reading):
        found = place["kinds"][kind]
        right = round(found["exact_match"]["share"] * found["n"])
        hits.setdefault(place["distance"], []).extend([True] * right + [False] * (found["n"] - right))
    shares = [wilson(answers) for answers in hits.values()]
    ends = {end: [_rounded(share[end]) for share in shares] for end in ("share", "low", "high")}
    return {"distance": list(hits), **ends}


def _places(seeds: Iterable[dict[str, Any]], reading: str) -> Iterable[dict[str, Any]]:
    for seed in seeds:
        for part in ("near", "far"):
            yield from seed.get(part, {}).get("facts", {}).get("readings", {}).get(reading, ())


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns)


if __name__ == "__main__":
    sys.exit(main())

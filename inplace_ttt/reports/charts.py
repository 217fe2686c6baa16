"""Draws charts as inline SVG, with matplotlib (the extra `plots`)."""

from __future__ import annotations

import io
import re
from typing import Any

_INK, _BLUE, _ORANGE = "#1f2933", "#2f6db3", "#d9822b"


def available() -> bool:
    """Returns True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def svg(chart: dict[str, Any]) -> str:
    """Draws one chart.

    Args:
        chart: title, axis labels, values, and kind: heat (a matrix), bars (labels and values) or curve (lines
            on log axes).

    Returns:
        An <svg> element.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "audit", "font.family": "sans-serif", "font.size": 9}
    ):
        figure = Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.subplots()
        _KINDS[chart["kind"]](axes, chart)
        axes.set_title(chart["title"], fontsize=9.5, color=_INK)
        axes.set_xlabel(chart["x"])
        axes.set_ylabel(chart["y"])
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    # unique ids, because one page holds many charts
    prefix = "chart-" + re.sub(r"\W+", "-", chart["title"]).strip("-").lower() + "-"
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", text)
    return text[text.index("<svg") :].replace(
        "<svg ", f'<svg role="img" aria-label="{chart["title"].replace(chr(34), "")}" ', 1
    )


def _heat(axes: Any, chart: dict[str, Any]) -> None:
    values = chart["values"]
    axes.imshow(values, cmap="Blues", vmin=0, vmax=max(1.0, *(max(row) for row in values)))
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            text = "0" if abs(value) < 5e-4 else f"{value:.2g}"
            axes.text(
                j, i, text, ha="center", va="center", color="white" if value > 0.6 else _INK, fontsize=8
            )
    axes.set_xticks(range(len(values)))
    axes.set_yticks(range(len(values)))


def _bars(axes: Any, chart: dict[str, Any]) -> None:
    axes.bar(chart["labels"], chart["values"], color=_BLUE, width=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=min(0, *chart["values"]))


def _curve(axes: Any, chart: dict[str, Any]) -> None:
    # The first line is wide and pale, so that lines on top of each other stay visible.
    styles = ((_ORANGE, 4.0, 0.55), (_BLUE, 1.5, 1.0))
    for (name, line), (color, width, alpha) in zip(chart["lines"].items(), styles, strict=False):
        shown = [(a, v) for a, v in zip(chart["at"], line, strict=True) if v > 0]
        axes.plot(*zip(*shown, strict=True), color=color, linewidth=width, alpha=alpha, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


_KINDS = {"heat": _heat, "bars": _bars, "curve": _curve}

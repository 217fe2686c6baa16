"""Colors, style and axis helpers of the diagnosis plots."""

from __future__ import annotations

from typing import Any

INK, SOFT, LINE = "#1f2933", "#52606d", "#d9dee4"
PALE = "#b9c2cc"
BLUE, ORANGE, GREEN, RED, BROWN = "#2f6db3", "#d9822b", "#1b7a43", "#b42318", "#8a5a00"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#eef1f4",
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
}


def _color(order: int, count: int) -> Any:
    """Returns the color of a TTT layer, from light (the first layer) to dark (the last)."""
    import matplotlib

    return matplotlib.colormaps["viridis"](0.85 - 0.8 * order / max(1, count - 1))


def draw_lines(axes: Any, series: dict[int, list[float]], legend: bool = True) -> None:
    """Draws one line per layer. With many layers, the legend names only the first and the last."""
    last = len(series) - 1
    for order, (index, values) in enumerate(series.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=_color(order, len(series)),
            marker="o",
            markersize=3,
            linewidth=1.6,
            label=f"layer {index}" if last < 12 or order in (0, last) else None,
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    if legend:
        axes.legend(fontsize=8.5, ncols=1 + len(axes.get_legend_handles_labels()[0]) // 6)


def log_axis(axes: Any, values: list[float], room: float = 3.0) -> None:
    """Sets a log axis whose range covers the values above zero."""
    shown = [v for v in values if 0 < v < float("inf")]
    if shown:
        axes.set_yscale("log")
        axes.set_ylim(min(shown) / room, max(shown) * room)


def draw_threshold(axes: Any, at: float, text: str, color: str = RED) -> None:
    """Draws a dashed horizontal line with a label at its right end."""
    axes.axhline(at, color=color, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        text, (1, at), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, color=color
    )

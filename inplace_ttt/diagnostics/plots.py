"""Draws the plots of a diagnosis as PNG files, with matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .diagnosis import Diagnosis
from .gradient_plots import draw_chunks, draw_gradients
from .plot_style import (
    BLUE,
    BROWN,
    GREEN,
    INK,
    LINE,
    ORANGE,
    PALE,
    RED,
    SOFT,
    STYLE,
    draw_lines,
    draw_threshold,
    log_axis,
)
from .write_rules import EXCEEDS_WEIGHT, FEW_DIRECTIONS, TENTH_OF_WEIGHT


@dataclass(frozen=True)
class Plot:
    """One plot of the report.

    Attributes:
        file: name of the PNG file.
        caption: text below the plot.
        draw: draws the plot onto a matplotlib figure.
        has: returns True if the diagnosis holds the plot's numbers.
    """

    file: str
    caption: str
    draw: Callable[[Any, Diagnosis], None]
    has: Callable[[Diagnosis], bool] = lambda d: True


def draw_all(diagnosis: Diagnosis, folder: Path) -> list[Plot]:
    """Writes every plot whose numbers were measured into `folder`, and returns these plots."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [plot for plot in PLOTS if plot.has(diagnosis)]
    with matplotlib.rc_context(STYLE):
        for plot in drawn:
            figure = Figure(figsize=(8, 3.6), dpi=130, layout="constrained")
            plot.draw(figure, diagnosis)
            figure.savefig(folder / plot.file, metadata={"Software": None})
    return drawn


def _writes(figure: Any, d: Diagnosis) -> None:
    writes = d.measured.writes
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    series = {i: [c.state_ratio for c in w.by_chunk] for i, w in writes.items()}
    values = [v for line in series.values() for v in line]
    log_axis(left, values)
    top = left.get_ylim()[1]
    for at, text, color in (
        (EXCEEDS_WEIGHT, "as large as the weight", RED),
        (TENTH_OF_WEIGHT, "a tenth of it", BROWN),
    ):
        if at / 3 < top:
            left.set_ylim(top=max(top, at * 2))
            draw_threshold(left, at, text, color)
    draw_lines(left, series)
    left.set(title="Sum of the writes of a document", xlabel="chunks written", ylabel="η‖S‖ / ‖W0‖")
    draw_lines(
        right,
        {
            i: [float("nan") if c.alignment is None else c.alignment for c in w.by_chunk]
            for i, w in writes.items()
        },
        legend=False,
    )
    right.set_ylim(-1.05, 1.05)
    right.axhline(0, color=LINE)
    right.set(title="Do writes repeat each other?", xlabel="chunk", ylabel="cosine with the write before")


def _effects(figure: Any, d: Diagnosis) -> None:
    m = d.measured
    left, right = figure.subplots(1, 2)
    names = [str(i) for i in m.effects]
    changes = [e.loss for e in m.effects.values()]
    if m.all_writes is not None:
        names.append("all")
        changes.append(m.all_writes)
    colors = [RED if c.loss > 0 else GREEN for c in changes]
    left.bar(names, [c.loss for c in changes], 0.55, color=colors)
    left.errorbar(
        names,
        [c.loss for c in changes],
        [2 * (c.stderr or 0) for c in changes],
        fmt="none",
        ecolor=INK,
        elinewidth=1.2,
        capsize=4,
    )
    left.axhline(0, color=INK, linewidth=0.8)
    left.grid(axis="x", visible=False)
    left.set(title="Loss, writes on − off", xlabel="layer whose writes are off", ylabel="nats per token")
    right.bar([str(i) for i in m.effects], [e.logits for e in m.effects.values()], 0.55, color=BLUE)
    right.grid(axis="x", visible=False)
    right.set(title="How far writes move the logits", xlabel="layer", ylabel="RMS change")


def _keys(figure: Any, d: Diagnosis) -> None:
    m = d.measured
    above, below = figure.subplots(2, 1, sharex=True)
    layers = sorted(m.keys)
    colors = [BLUE if i in m.etas else PALE for i in layers]
    above.bar(layers, [m.keys[i].effective for i in layers], 0.8, color=colors)
    log_axis(above, [m.keys[i].effective for i in layers], room=1.6)
    above.set_ylim(bottom=0.8)
    above.axhline(FEW_DIRECTIONS, color=RED, linewidth=1, linestyle=(0, (4, 3)))
    above.set(
        title="Directions that each layer's keys span (blue: TTT layers)",
        ylabel="participation\nratio of Z",
    )
    below.bar(layers, [m.keys[i].collision for i in layers], 0.8, color=colors)
    below.set_ylim(0, 1)
    below.set(title="How much the keys of two tokens collide", xlabel="decoder layer", ylabel="RMS cosine")
    below.set_xticks(layers if len(layers) <= 40 else layers[::4])
    below.tick_params(axis="x", labelsize=8)
    for axes in (above, below):
        axes.grid(axis="x", visible=False)


def _sweeps(figure: Any, d: Diagnosis) -> None:
    sweeps = d.measured.sweeps
    titles = {
        "eta": ("eta with the model's own conv and P", "eta"),
        "init": ("an untrained start of conv", "standard deviation of conv"),
    }
    for axes, sweep in zip(figure.subplots(1, len(sweeps), squeeze=False)[0], sweeps, strict=True):
        x = [p.value for p in sweep.points]
        y = [p.loss.loss for p in sweep.points]
        axes.errorbar(
            x,
            y,
            [2 * (p.loss.stderr or 0) for p in sweep.points],
            color=BLUE,
            marker="o",
            markersize=4,
            linewidth=1.6,
            capsize=3,
        )
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=0.01)
        axes.axhline(0, color=INK, linewidth=0.8)
        for point, value in zip(sweep.points, y, strict=True):
            top = value + 2 * (point.loss.stderr or 0)
            axes.annotate(
                f"{point.state_ratio:.2g}",
                (point.value, top),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=SOFT,
            )
        if sweep.safe is not None:
            axes.axvspan(x[0] / 2, sweep.safe * 1.25, color=GREEN, alpha=0.08, zorder=0)
        if sweep.now is not None:
            axes.axvline(sweep.now, color=SOFT, linewidth=1, linestyle=(0, (2, 2)))
            axes.annotate(
                " now", (sweep.now, 0.02), xycoords=("data", "axes fraction"), fontsize=8.5, color=SOFT
            )
        axes.set_xlim(x[0] / 2, x[-1] * 2)
        axes.margins(y=0.15)
        title, label = titles[sweep.name]
        safe = "none measured is safe" if sweep.safe is None else f"safe to {sweep.safe:.2g}"
        axes.set(title=f"{title}: {safe}", xlabel=label, ylabel="loss, writes on − off (nats)")


def _precision(figure: Any, d: Diagnosis) -> None:
    writes = {i: w.lost for i, w in d.measured.writes.items()}
    axes = figure.subplots()
    dtype = next(iter(writes.values())).dtype
    series = [
        (f"S summed in {dtype}", [w.state for w in writes.values()], ORANGE),
        (f"W0 + ηS summed in {dtype}", [w.weight for w in writes.values()], RED),
        ("the output's rounding, as it is", [w.output for w in writes.values()], BLUE),
    ]
    for offset, (name, values, color) in zip((-0.27, 0.0, 0.27), series, strict=True):
        axes.bar(
            [x + offset for x in range(len(writes))], [v or 0 for v in values], 0.25, color=color, label=name
        )
        for x, value in enumerate(values):
            if value is not None:
                axes.annotate(
                    f"{value:.2g}", (x + offset, value), ha="center", va="bottom", fontsize=8, color=SOFT
                )
    axes.set_xticks(range(len(writes)), [str(i) for i in writes])
    axes.grid(axis="x", visible=False)
    log_axis(axes, [v for _, values, _ in series for v in values if v])
    axes.legend(fontsize=8.5, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0)
    axes.set(title="Part of the update lost to rounding", xlabel="TTT layer", ylabel="fraction lost")


def _writing(d: Diagnosis) -> bool:
    return any(w.state_ratio > 0 for w in d.measured.writes.values())


PLOTS: tuple[Plot, ...] = (
    Plot(
        "gradients.png",
        "Left: conv and P of a healthy target generator get a gradient of W_down's order or more; below "
        "the dashed line it has vanished. "
        "Right: how far Adam's first step moves each kind of parameter.",
        draw_gradients,
        lambda d: any(d.measured.gradients.norms.values()),
    ),
    Plot(
        "chunks.png",
        "Later chunks read a write, so the writes of early chunks get the most gradient, and the last none.",
        draw_chunks,
        lambda d: any(any(values) for values in d.measured.gradients.by_chunk.values()),
    ),
    Plot(
        "writes.png",
        "Left: a slope of one half means unrelated writes, a slope of one a drift. Right: writes near 1 "
        "repeat each other.",
        _writes,
        _writing,
    ),
    Plot(
        "effects.png",
        "Over the tokens that can read a write. Below zero the writes help; whiskers are two standard "
        "errors over chunks.",
        _effects,
        lambda d: bool(d.measured.effects),
    ),
    Plot(
        "keys.png",
        "Choose layers whose keys span many directions; below the dashed line, keys do not distinguish "
        "tokens.",
        _keys,
        lambda d: bool(d.measured.keys),
    ),
    Plot(
        "sweeps.png",
        "Values in green do not raise the loss. Small numbers are η‖S‖/‖W0‖ at each point; the axis is "
        "linear within ±0.01 nats.",
        _sweeps,
        lambda d: bool(d.measured.sweeps),
    ),
    Plot(
        "precision.png",
        "Orange and red: the loss of the same writes if the sum were kept in half precision. Blue: the loss "
        "by rounding this model's output.",
        _precision,
        _writing,
    ),
)

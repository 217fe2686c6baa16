"""The pictures of a diagnosis as PNG files, drawn by matplotlib where it is installed (the extra `plots`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .diagnosis import Diagnosis
from .gradients import VANISHED
from .rules import EXCEEDS_WEIGHT, FEW_DIRECTIONS, TENTH_OF_WEIGHT

_INK, _SOFT, _LINE = "#1f2933", "#52606d", "#d9dee4"
_PALE = "#b9c2cc"
_BLUE, _ORANGE, _GREEN, _RED, _BROWN = "#2f6db3", "#d9822b", "#1b7a43", "#b42318", "#8a5a00"
_KINDS = (_BLUE, _ORANGE, _SOFT, _GREEN)
_NAMES = {"conv": "conv", "proj": "P", "weight": "W_down", "embeddings": "embeddings"}
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "axes.labelcolor": _SOFT,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#eef1f4",
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """file: its name. caption: how to read it. draw: onto a figure."""

    file: str
    caption: str
    draw: Callable[[Any, Diagnosis], None]
    has: Callable[[Diagnosis], bool] = lambda d: True


def draw_all(diagnosis: Diagnosis, folder: Path) -> list[Plot]:
    """Write every plot that there are numbers for; gives back which."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [plot for plot in PLOTS if plot.has(diagnosis)]
    with matplotlib.rc_context(_STYLE):
        for plot in drawn:
            figure = Figure(figsize=(8, 3.6), dpi=130, layout="constrained")
            plot.draw(figure, diagnosis)
            figure.savefig(folder / plot.file, metadata={"Software": None})
    return drawn


def _colour(order: int, count: int) -> Any:
    """From the first TTT layer (light) to the last (dark)."""
    import matplotlib

    return matplotlib.colormaps["viridis"](0.85 - 0.8 * order / max(1, count - 1))


def _lines(axes: Any, series: dict[int, list[float]], legend: bool = True) -> None:
    """One line a layer; of many layers the legend has the first and the last."""
    last = len(series) - 1
    for order, (index, values) in enumerate(series.items()):
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=_colour(order, len(series)),
            marker="o",
            markersize=3,
            linewidth=1.6,
            label=f"layer {index}" if last < 12 or order in (0, last) else None,
        )
    axes.xaxis.get_major_locator().set_params(integer=True)
    if legend:
        axes.legend(fontsize=8.5, ncols=1 + len(axes.get_legend_handles_labels()[0]) // 6)


def _log(axes: Any, values: list[float], room: float = 3.0) -> None:
    """A log axis over the values above zero."""
    shown = [v for v in values if 0 < v < float("inf")]
    if shown:
        axes.set_yscale("log")
        axes.set_ylim(min(shown) / room, max(shown) * room)


def _threshold(axes: Any, at: float, text: str, colour: str = _RED) -> None:
    axes.axhline(at, color=colour, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        text, (1, at), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, color=colour
    )


def _gradients(figure: Any, d: Diagnosis) -> None:
    m = d.measured
    left, right = figure.subplots(1, 2)
    layers = list(m.etas)
    colours = {"conv": _BLUE, "proj": _ORANGE, "weight": _SOFT}
    kinds = [
        (kind, colour)
        for kind, colour in colours.items()
        if any(key[1] == kind for key in m.sizes) or kind == "weight"
    ]
    norms = [norm for key, norm in m.gradients.norms.items() if key[0] is not None]
    _log(left, [*norms, *(m.gradients.norms.get((i, "weight"), 0.0) * VANISHED for i in layers)])
    floor = left.get_ylim()[0]
    for offset, (kind, colour) in zip((-0.27, 0.0, 0.27), kinds, strict=False):
        values = [m.gradients.norms.get((i, kind), 0.0) for i in layers]
        left.bar(
            [x + offset for x in range(len(layers))],
            [max(v, floor) for v in values],
            0.25,
            color=colour,
            label=_NAMES[kind],
        )
        for x, value in enumerate(values):
            if value == 0:
                left.annotate(
                    "0",
                    (x + offset, floor),
                    ha="center",
                    va="bottom",
                    fontsize=9,
                    color=colour,
                    fontweight="bold",
                )
    for x, i in enumerate(layers):
        limit = m.gradients.norms.get((i, "weight"), 0.0) * VANISHED
        left.plot(
            [x - 0.4, x + 0.4],
            [limit, limit],
            color=_RED,
            linewidth=1.2,
            linestyle=(0, (3, 2)),
            label="vanished below" if x == 0 else None,
        )
    left.set_xticks(range(len(layers)), [f"{i}" for i in layers])
    left.grid(axis="x", visible=False)
    left.set(title="Gradient norm by layer", xlabel="TTT layer", ylabel="‖∂L/∂·‖")
    left.legend(
        fontsize=8.5,
        ncols=4,
        loc="upper left",
        bbox_to_anchor=(0, -0.2),
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1,
    )
    groups = d.to_dict()["groups"]
    shares = {
        _NAMES[name]: (group["step_over_parameter"], colour)
        for (name, group), colour in zip(groups.items(), _KINDS, strict=True)
        if group["parameter"] is not None
    }
    moving = {name: value for name, (value, _) in shares.items() if value}
    right.barh(
        list(shares),
        [value or 0 for value, _ in shares.values()],
        0.55,
        color=[colour for _, colour in shares.values()],
    )
    if moving:
        right.set_xscale("log")
        right.set_xlim(
            10 ** math.floor(math.log10(min(moving.values())) - 0.5),
            10 ** math.ceil(math.log10(max(moving.values())) + 1),
        )
    for y, name in enumerate(shares):
        if name in moving:
            right.annotate(f" {moving[name]:.1e}", (moving[name], y), va="center", fontsize=8.5, color=_SOFT)
        else:
            said = " starts at zero" if groups["conv"]["gradient"] and name == "conv" else " no gradient"
            right.annotate(
                said, (0, y), xycoords=("axes fraction", "data"), va="center", fontsize=8.5, color=_SOFT
            )
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.set(title="Adam's first step", xlabel="‖step‖ / ‖parameter‖")


def _chunks(figure: Any, d: Diagnosis) -> None:
    axes = figure.subplots()
    series = d.measured.gradients.by_chunk
    _log(axes, [v for values in series.values() for v in values])
    _lines(axes, {i: [v if v > 0 else float("nan") for v in values] for i, values in series.items()})
    dead = next((n for n, values in enumerate(zip(*series.values(), strict=True)) if not any(values)), None)
    count = max(len(values) for values in series.values())
    if dead is not None:
        axes.axvspan(dead + 0.5, count + 0.5, color="#f5f7f9", zorder=0)
        axes.annotate(
            "nobody reads the last",
            (count + 0.4, 0.03),
            xycoords=("data", "axes fraction"),
            ha="right",
            fontsize=8.5,
            color=_SOFT,
        )
    axes.set_xlim(0.5, count + 0.5)
    axes.set(
        title="Gradient that reaches each chunk's write",
        xlabel="chunk of the longest document",
        ylabel="‖∂L/∂V‖ of the chunk",
    )


def _writes(figure: Any, d: Diagnosis) -> None:
    writes = d.measured.writes
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    series = {i: [c.state_ratio for c in w.by_chunk] for i, w in writes.items()}
    values = [v for line in series.values() for v in line]
    _log(left, values)
    top = left.get_ylim()[1]
    for at, text, colour in (
        (EXCEEDS_WEIGHT, "as large as the weight", _RED),
        (TENTH_OF_WEIGHT, "a tenth of it", _BROWN),
    ):
        if at / 3 < top:
            left.set_ylim(top=max(top, at * 2))
            _threshold(left, at, text, colour)
    _lines(left, series)
    left.set(title="What a document's writes add up to", xlabel="chunks written", ylabel="η‖S‖ / ‖W0‖")
    _lines(
        right,
        {
            i: [float("nan") if c.alignment is None else c.alignment for c in w.by_chunk]
            for i, w in writes.items()
        },
        legend=False,
    )
    right.set_ylim(-1.05, 1.05)
    right.axhline(0, color=_LINE)
    right.set(title="Do writes repeat each other?", xlabel="chunk", ylabel="cosine with the write before")


def _effects(figure: Any, d: Diagnosis) -> None:
    m = d.measured
    left, right = figure.subplots(1, 2)
    names = [str(i) for i in m.effects]
    changes = [e.loss for e in m.effects.values()]
    if m.all_writes is not None:
        names.append("all")
        changes.append(m.all_writes)
    colours = [_RED if c.loss > 0 else _GREEN for c in changes]
    left.bar(names, [c.loss for c in changes], 0.55, color=colours)
    left.errorbar(
        names,
        [c.loss for c in changes],
        [2 * (c.stderr or 0) for c in changes],
        fmt="none",
        ecolor=_INK,
        elinewidth=1.2,
        capsize=4,
    )
    left.axhline(0, color=_INK, linewidth=0.8)
    left.grid(axis="x", visible=False)
    left.set(title="Loss, writes on − off", xlabel="layer whose writes are off", ylabel="nats a token")
    right.bar([str(i) for i in m.effects], [e.logits for e in m.effects.values()], 0.55, color=_BLUE)
    right.grid(axis="x", visible=False)
    right.set(title="How far writes move the logits", xlabel="layer", ylabel="RMS change")


def _keys(figure: Any, d: Diagnosis) -> None:
    m = d.measured
    above, below = figure.subplots(2, 1, sharex=True)
    layers = sorted(m.keys)
    colours = [_BLUE if i in m.etas else _PALE for i in layers]
    above.bar(layers, [m.keys[i].effective for i in layers], 0.8, color=colours)
    _log(above, [m.keys[i].effective for i in layers], room=1.6)
    above.set_ylim(bottom=0.8)
    above.axhline(FEW_DIRECTIONS, color=_RED, linewidth=1, linestyle=(0, (4, 3)))
    above.set(
        title="Directions that each layer's keys span (blue: TTT layers)",
        ylabel="participation\nratio of Z",
    )
    below.bar(layers, [m.keys[i].collision for i in layers], 0.8, color=colours)
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
            color=_BLUE,
            marker="o",
            markersize=4,
            linewidth=1.6,
            capsize=3,
        )
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=0.01)
        axes.axhline(0, color=_INK, linewidth=0.8)
        for point, value in zip(sweep.points, y, strict=True):
            top = value + 2 * (point.loss.stderr or 0)
            axes.annotate(
                f"{point.state_ratio:.2g}",
                (point.value, top),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=_SOFT,
            )
        if sweep.safe is not None:
            axes.axvspan(x[0] / 2, sweep.safe * 1.25, color=_GREEN, alpha=0.08, zorder=0)
        if sweep.now is not None:
            axes.axvline(sweep.now, color=_SOFT, linewidth=1, linestyle=(0, (2, 2)))
            axes.annotate(
                " now", (sweep.now, 0.02), xycoords=("data", "axes fraction"), fontsize=8.5, color=_SOFT
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
        (f"S summed in {dtype}", [w.state for w in writes.values()], _ORANGE),
        (f"W0 + ηS summed in {dtype}", [w.weight for w in writes.values()], _RED),
        ("the output's rounding, as it is", [w.output for w in writes.values()], _BLUE),
    ]
    for offset, (name, values, colour) in zip((-0.27, 0.0, 0.27), series, strict=True):
        axes.bar(
            [x + offset for x in range(len(writes))], [v or 0 for v in values], 0.25, color=colour, label=name
        )
        for x, value in enumerate(values):
            if value is not None:
                axes.annotate(
                    f"{value:.2g}", (x + offset, value), ha="center", va="bottom", fontsize=8, color=_SOFT
                )
    axes.set_xticks(range(len(writes)), [str(i) for i in writes])
    axes.grid(axis="x", visible=False)
    _log(axes, [v for _, values, _ in series for v in values if v])
    axes.legend(fontsize=8.5, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.2), borderaxespad=0)
    axes.set(title="What rounding takes of the update", xlabel="TTT layer", ylabel="fraction lost")


def _writing(d: Diagnosis) -> bool:
    return any(w.state_ratio > 0 for w in d.measured.writes.values())


PLOTS: tuple[Plot, ...] = (
    Plot(
        "gradients.png",
        "Left: conv and P of a healthy target generator get a gradient of W_down's order or more; below "
        "the dashed line it has vanished. "
        "Right: how far Adam's first step moves each kind of parameter.",
        _gradients,
        lambda d: any(d.measured.gradients.norms.values()),
    ),
    Plot(
        "chunks.png",
        "A write is read by the chunks after it, so early chunks get most, and the last ones none.",
        _chunks,
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
        "Choose layers whose keys span many directions; below the dashed line they cannot tell tokens apart.",
        _keys,
        lambda d: bool(d.measured.keys),
    ),
    Plot(
        "sweeps.png",
        "Green is what does not raise the loss. Small numbers are η‖S‖/‖W0‖ at each point; the axis is "
        "linear within ±0.01 nats.",
        _sweeps,
        lambda d: bool(d.measured.sweeps),
    ),
    Plot(
        "precision.png",
        "Orange and red: what the same writes would lose if the sum were kept in half precision. Blue: "
        "what this model's output loses now.",
        _precision,
        _writing,
    ),
)

"""Draws the gradient plots of a diagnosis: by layer, by kind of parameter, and by chunk."""

from __future__ import annotations

import math
from typing import Any

from .diagnosis import Diagnosis
from .gradients import VANISHED
from .plot_style import BLUE, GREEN, ORANGE, RED, SOFT, draw_lines, log_axis

_COLORS = (BLUE, ORANGE, SOFT, GREEN)
_NAMES = {"conv": "conv", "proj": "P", "weight": "W_down", "embeddings": "embeddings"}


def draw_gradients(figure: Any, d: Diagnosis) -> None:
    """Draws gradient norms by layer, and the size of Adam's first step by kind of parameter."""
    m = d.measured
    left, right = figure.subplots(1, 2)
    layers = list(m.etas)
    colors = {"conv": BLUE, "proj": ORANGE, "weight": SOFT}
    kinds = [
        (kind, color)
        for kind, color in colors.items()
        if any(key[1] == kind for key in m.sizes) or kind == "weight"
    ]
    norms = [norm for key, norm in m.gradients.norms.items() if key[0] is not None]
    log_axis(left, [*norms, *(m.gradients.norms.get((i, "weight"), 0.0) * VANISHED for i in layers)])
    floor = left.get_ylim()[0]
    for offset, (kind, color) in zip((-0.27, 0.0, 0.27), kinds, strict=False):
        values = [m.gradients.norms.get((i, kind), 0.0) for i in layers]
        left.bar(
            [x + offset for x in range(len(layers))],
            [max(v, floor) for v in values],
            0.25,
            color=color,
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
                    color=color,
                    fontweight="bold",
                )
    for x, i in enumerate(layers):
        limit = m.gradients.norms.get((i, "weight"), 0.0) * VANISHED
        left.plot(
            [x - 0.4, x + 0.4],
            [limit, limit],
            color=RED,
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
        _NAMES[name]: (group["step_over_parameter"], color)
        for (name, group), color in zip(groups.items(), _COLORS, strict=True)
        if group["parameter"] is not None
    }
    moving = {name: value for name, (value, _) in shares.items() if value}
    right.barh(
        list(shares),
        [value or 0 for value, _ in shares.values()],
        0.55,
        color=[color for _, color in shares.values()],
    )
    if moving:
        right.set_xscale("log")
        right.set_xlim(
            10 ** math.floor(math.log10(min(moving.values())) - 0.5),
            10 ** math.ceil(math.log10(max(moving.values())) + 1),
        )
    for y, name in enumerate(shares):
        if name in moving:
            right.annotate(f" {moving[name]:.1e}", (moving[name], y), va="center", fontsize=8.5, color=SOFT)
        else:
            note = " starts at zero" if groups["conv"]["gradient"] and name == "conv" else " no gradient"
            right.annotate(
                note, (0, y), xycoords=("axes fraction", "data"), va="center", fontsize=8.5, color=SOFT
            )
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.set(title="Adam's first step", xlabel="‖step‖ / ‖parameter‖")


def draw_chunks(figure: Any, d: Diagnosis) -> None:
    """Draws the gradient that reaches each chunk's write, by layer."""
    axes = figure.subplots()
    series = d.measured.gradients.by_chunk
    log_axis(axes, [v for values in series.values() for v in values])
    draw_lines(axes, {i: [v if v > 0 else float("nan") for v in values] for i, values in series.items()})
    dead = next((n for n, values in enumerate(zip(*series.values(), strict=True)) if not any(values)), None)
    count = max(len(values) for values in series.values())
    if dead is not None:
        axes.axvspan(dead + 0.5, count + 0.5, color="#f5f7f9", zorder=0)
        axes.annotate(
            "no token reads the last",
            (count + 0.4, 0.03),
            xycoords=("data", "axes fraction"),
            ha="right",
            fontsize=8.5,
            color=SOFT,
        )
    axes.set_xlim(0.5, count + 0.5)
    axes.set(
        title="Gradient that reaches each chunk's write",
        xlabel="chunk of the longest document",
        ylabel="‖∂L/∂V‖ of the chunk",
    )

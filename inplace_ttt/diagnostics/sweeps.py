"""What η and what start of conv are safe here: the loss over a sweep of each, against the writes off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..surgery import initial_std
from .diagnosed_model import DiagnosedModel
from .overrides import paper_p, random_like, with_eta, with_values
from .write_effects import HARM, Change, Reading, Scored, read
from .writes import WriteHealth, observed

_ETA_FACTORS = (0.1, 0.3, 3.0, 10.0)
_CONV_STDS = (1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Point:
    """value: η, or the standard deviation of conv. state_ratio: the largest η‖S‖/‖W0‖ of all layers."""

    value: float
    loss: Change
    state_ratio: float


@dataclass(frozen=True)
class Sweep:
    """Measurements points from small to large. now: where the model stands, if on this curve."""

    name: Literal["eta", "init"]
    points: tuple[Point, ...]
    now: float | None

    @property
    def safe(self) -> float | None:
        """The largest value up to which no point raises the loss; None where the smallest does."""
        best = None
        for point in self.points:
            if math.isnan(point.loss.loss) or point.loss.exceeds(HARM):
                break
            best = point.value
        return best

    @property
    def bounded(self) -> bool:
        """Whether a point beyond the safe ones was measured."""
        return self.safe != self.points[-1].value

    def to_dict(self) -> dict[str, Any]:
        points = [
            {
                "value": p.value,
                "loss_change": p.loss.loss,
                "stderr": p.loss.stderr,
                "state_ratio": p.state_ratio,
            }
            for p in self.points
        ]
        return {"now": self.now, "safe": self.safe, "bounded": self.bounded, "points": points}


def sweep_eta(
    model: DiagnosedModel,
    scored: Scored,
    on: tuple[Reading, float],
    off: Reading,
    tick: Callable[[str], None],
) -> Sweep:
    """η of all layers times a factor, with the model's own conv and P. on: the reading as it is, and its
    largest state ratio.

    The curve is in terms of the largest η of the layers. Where that is 0, which no factor raises, it is one
    of 1 in all of them.
    """
    now = max(layer.eta for layer in model.layers.values())
    etas = {index: layer.eta if now else 1.0 for index, layer in model.layers.items()}
    points = [Point(now, scored.change(on[0], off), on[1])] if now else []
    for factor in _ETA_FACTORS if now else (*_ETA_FACTORS, 1.0):
        tick(f"eta × {factor:g}")
        change = with_eta(model.layers, {index: eta * factor for index, eta in etas.items()})
        points.append(_point((now or 1.0) * factor, model, scored, off, change))
    return Sweep("eta", tuple(sorted(points, key=lambda p: p.value)), now or None)


def sweep_init(model: DiagnosedModel, scored: Scored, off: Reading, tick: Callable[[str], None]) -> Sweep:
    """conv drawn from N(0, s²) in every layer, P as the paper draws it, the model's own η: how large an
    untrained start may be."""
    parameters, points = model.parameters(), []
    sigma = initial_std(model.module.config)
    for std in _CONV_STDS:
        tick(f"conv N(0, {std:g}²)")
        values = {}
        for index in model.layers:
            conv, proj = parameters[index, "conv"], parameters[index, "proj"]
            values[conv] = random_like(conv, *conv.shape) * std
            values[proj] = paper_p(proj, sigma)
        points.append(_point(std, model, scored, off, with_values(values)))
    return Sweep("init", tuple(points), None)


def _point(value: float, model: DiagnosedModel, scored: Scored, off: Reading, change: Any) -> Point:
    writes: dict[int, WriteHealth] = {}
    with change, observed(model.module, writes):
        reading = read(model)
    return Point(
        value, scored.change(reading, off), max((w.state_ratio for w in writes.values()), default=0.0)
    )

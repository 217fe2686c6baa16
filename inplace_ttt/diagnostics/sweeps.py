"""Finds safe values of η and of conv's initial size, from the loss with writes minus the loss without."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..surgery import initial_std
from .diagnosed_model import DiagnosedModel
from .observing import observed
from .overrides import paper_p, random_like, with_eta, with_values
from .write_effects import HARM, Change, Reading, Scored, read
from .writes import WriteHealth

_ETA_FACTORS = (0.1, 0.3, 3.0, 10.0)
_CONV_STDS = (1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Point:
    """One measured value.

    Attributes:
        value: η, or the standard deviation of conv.
        loss: the loss with writes minus the loss without.
        state_ratio: largest η‖S‖/‖W0‖ over all layers.
    """

    value: float
    loss: Change
    state_ratio: float


@dataclass(frozen=True)
class Sweep:
    """Measured values of one quantity.

    Attributes:
        name: "eta" or "init".
        points: from the smallest value to the largest.
        now: the model's own value; None if it is not on this curve.
    """

    name: Literal["eta", "init"]
    points: tuple[Point, ...]
    now: float | None

    @property
    def safe(self) -> float | None:
        """Largest value up to which no point raises the loss; None if even the smallest value raises it."""
        best = None
        for point in self.points:
            if math.isnan(point.loss.loss) or point.loss.exceeds(HARM):
                break
            best = point.value
        return best

    @property
    def bounded(self) -> bool:
        """True if a point beyond the safe ones was measured."""
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
    """Measures the loss with the model's own conv and P, and with η of all layers times a factor.

    The curve is a function of the largest η of the layers. If η is 0 in all layers, each factor itself is
    used as η in every layer.

    Args:
        model: the model; it is restored afterwards.
        scored: the tokens to compare.
        on: the reading with the model's own η, and its largest state ratio.
        off: the reading with the writes off.
        tick: called with a title before each forward pass.
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
    """Measures the loss with conv drawn from N(0, s²) in every layer, for several s.

    P is drawn as in the paper, and η is the model's own. The sweep shows how large an untrained conv may be.
    """
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

"""Measures the effect of Adam's first step on the loss and on the entries of half-precision parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .diagnosed_model import DiagnosedModel, Key
from .gradients import Rates
from .overrides import with_values

GENTLER = 0.1
"""Fraction of the learning rates at which the step is tried a second time."""


@dataclass(frozen=True)
class FirstStep:
    """Effect of Adam's first step.

    Attributes:
        losses: mean loss in training mode after the step, at the learning rates and at a tenth of them.
        moved: for each parameter in half precision, the fraction of entries that the step changes, if the
            optimizer keeps no float32 copy. Only entries with a gradient count.
    """

    losses: tuple[float, float]
    moved: dict[Key, float]


def try_first_step(model: DiagnosedModel, found: dict[Key, Tensor], rates: Rates) -> FirstStep | None:
    """Tries Adam's first step, which moves every entry by the learning rate, against the gradient's sign.

    Args:
        model: the model; its parameters are restored afterwards.
        found: gradient of each diagnosed parameter, in its shape.
        rates: learning rates of the step.

    Returns:
        The effect of the step, or None if no diagnosed parameter is trained.
    """
    known = model.parameters()
    trained = {
        key: known[key]
        for key, gradient in found.items()
        if known[key].requires_grad and bool(gradient.any())
    }
    if not trained:
        return None
    whole, gentle = (
        {p: p.detach() - factor * rates.of(key) * found[key].sign() for key, p in trained.items()}
        for factor in (1.0, GENTLER)
    )
    moved = {}
    for key, parameter in trained.items():
        if torch.finfo(parameter.dtype).bits <= 16:
            acts = found[key] != 0
            moved[key] = float((whole[parameter] != parameter.detach())[acts].float().mean())
    return FirstStep((_loss(model, whole), _loss(model, gentle)), moved)


@torch.no_grad()
def _loss(model: DiagnosedModel, values: dict[nn.Parameter, Tensor]) -> float:
    with with_values(values), model.mode(training=True):
        return float(model.forward(labels=model.labels).loss)


def loss_slope(model: DiagnosedModel, layers: list[int], step: float) -> float:
    """Returns dL/d ln ‖P‖ of some layers together, by a central difference in training mode.

    The loss is computed with P times 1 + step and with P times 1 - step.
    """
    known = model.parameters()
    up, down = (
        _loss(model, {known[i, "proj"]: known[i, "proj"].detach() * (1 + s * step) for i in layers})
        for s in (1, -1)
    )
    return (up - down) / (2 * step)

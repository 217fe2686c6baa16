"""What Adam's first step does: to the loss, and to the entries of parameters in half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .diagnosed_model import DiagnosedModel, Key
from .gradients import Rates
from .overrides import with_values

GENTLER = 0.1
"""Of the rates: the step that is tried beside the whole one."""


@dataclass(frozen=True)
class FirstStep:
    """losses: mean loss, in training mode, after the step at the rates and at a tenth of them. moved: by
        parameter in half precision the
    share of its entries, of those with a gradient, that the step changes where nobody keeps them in float32.
    """

    losses: tuple[float, float]
    moved: dict[Key, float]


def try_first_step(model: DiagnosedModel, found: dict[Key, Tensor], rates: Rates) -> FirstStep | None:
    """Every diagnosed parameter that is trained goes its rate against the sign of its gradient; None where
    none is.

    found: the gradients.
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
    """dL/d ln ‖P‖ of some layers together, by a difference of the loss at P times 1 + step and 1 - step, in
    training mode."""
    known = model.parameters()
    up, down = (
        _loss(model, {known[i, "proj"]: known[i, "proj"].detach() * (1 + s * step) for i in layers})
        for s in (1, -1)
    )
    return (up - down) / (2 * step)

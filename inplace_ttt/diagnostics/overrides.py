"""Changes to a model that last for a `with`: how a possible cause is removed and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..layer.fast_linear import FastWeight
from ..layer.overrides import overriding


@contextmanager
def with_eta(layers: Mapping[int, FastWeight], etas: Mapping[int, float]) -> Iterator[None]:
    """Other η for some layers; 0 turns a layer's writes off."""
    with ExitStack() as stack:
        for index, eta in etas.items():
            stack.enter_context(overriding([layers[index].fast], eta=eta))
        yield


@contextmanager
def with_values(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Other values in parameters, which get their own back bit by bit."""
    before = {parameter: parameter.detach().clone() for parameter in values}
    try:
        _copy(values)
        yield
    finally:
        _copy(before)


def random_like(parameter: Tensor, *shape: int) -> Tensor:
    """The same standard normal draws every time, in a parameter's dtype and place."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(parameter)


def paper_p(proj: Tensor, std: float) -> Tensor:
    """P as the paper draws it: diagonal, N(0, std²)."""
    return torch.diag(random_like(proj, proj.shape[0]) * std)


@torch.no_grad()
def _copy(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)

"""Changes a model inside a `with` block, to remove a possible cause, and restores it at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..layer.fast_linear import FastWeight
from ..layer.overrides import overriding


@contextmanager
def with_eta(layers: Mapping[int, FastWeight], etas: Mapping[int, float]) -> Iterator[None]:
    """Sets η of some layers. An η of 0 turns a layer's writes off."""
    with ExitStack() as stack:
        for index, eta in etas.items():
            stack.enter_context(overriding([layers[index].fast], eta=eta))
        yield


@contextmanager
def with_values(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Sets the values of parameters, and restores the old ones bit by bit."""
    before = {parameter: parameter.detach().clone() for parameter in values}
    try:
        _copy(values)
        yield
    finally:
        _copy(before)


def random_like(parameter: Tensor, *shape: int) -> Tensor:
    """Draws standard normal values, the same at every call, with a parameter's dtype and device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(parameter)


def paper_p(proj: Tensor, std: float) -> Tensor:
    """Returns P as initialized in the paper: diagonal, N(0, std²)."""
    return torch.diag(random_like(proj, proj.shape[0]) * std)


@torch.no_grad()
def _copy(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)

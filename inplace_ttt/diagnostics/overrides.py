"""Changes to a model that last for a `with`: how a possible cause is removed and put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..layer.fast_linear import FastWeight


@contextmanager
def with_eta(layers: Mapping[int, FastWeight], etas: Mapping[int, float]) -> Iterator[None]:
    """Other η for some layers; 0 turns a layer's writes off."""
    before = {index: layers[index].fast.eta for index in etas}
    try:
        for index, eta in etas.items():
            layers[index].fast.eta = eta
        yield
    finally:
        for index, eta in before.items():
            layers[index].fast.eta = eta


@contextmanager
def with_config(layers: Iterable[FastWeight], **changes: Any) -> Iterator[None]:
    """Other settings of the TTT config."""
    before = [(layer.fast, layer.fast.config) for layer in layers]
    try:
        for settings, config in before:
            settings.config = dataclasses.replace(config, **changes)
        yield
    finally:
        for settings, config in before:
            settings.config = config


@contextmanager
def with_values(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Other values in parameters, which get their own back bit by bit."""
    before = {parameter: parameter.detach().clone() for parameter in values}
    try:
        _copy(values)
        yield
    finally:
        _copy(before)


@contextmanager
def requiring_grad(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters whose gradient is asked for, frozen or not."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


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

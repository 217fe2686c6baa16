"""What is other for a `with`: settings of TTT layers, switches of a model, modes of modules, parameters;
random generators."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def overriding(owners: Iterable[Any], **values: Any) -> Iterator[None]:
    """Within it attributes of all owners have these values; afterwards each has its own again."""
    before = [(owner, name, getattr(owner, name)) for owner in owners for name in values]
    try:
        for owner, name, _ in before:
            setattr(owner, name, values[name])
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def with_config(layers: Iterable[Any], **changes: Any) -> Iterator[None]:
    """Within it TTT layers (`FastWeight`) have other settings."""
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(
                overriding([layer.fast], config=dataclasses.replace(layer.fast.config, **changes))
            )
        yield


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """The random generators of the CPU and of the model's devices set to a seed, and as before afterwards."""
    devices = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield

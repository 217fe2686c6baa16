"""Contexts that set attributes, settings of TTT layers, or random generators, and then restore them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def overriding(owners: Iterable[Any], **values: Any) -> Iterator[None]:
    """Sets attributes of all owners inside the context, and restores the old values at its end.

    Args:
        owners: any objects.
        values: the attributes and their values.
    """
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
    """Changes the config of TTT layers inside the context.

    Args:
        layers: `FastWeight` modules.
        changes: fields of `InPlaceTTTConfig` and their values.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(
                overriding([layer.fast], config=dataclasses.replace(layer.fast.config, **changes))
            )
        yield


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seeds the random generators of the CPU and of the model's GPUs, and restores them at the end."""
    devices = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield

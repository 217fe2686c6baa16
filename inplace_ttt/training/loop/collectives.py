"""Collective calls over all ranks, which do nothing in a run of one process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def summed(value: Tensor, device: Any) -> Tensor:
    value = value.to(device)
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def from_all(value: Any) -> list[Any]:
    """Returns every rank's value, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

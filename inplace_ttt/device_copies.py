"""Copies from the host to a device, for the op's bookkeeping and for the kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a host tensor on a device, which every stream may read.

    On a GPU the host waits for this copy alone, not for the device's queued work.
    """
    if device.type != "cuda":
        return host.to(device)
    with torch.cuda.stream(_copies(device)):
        copy = host.pin_memory().to(device, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    copy.record_stream(torch.cuda.current_stream(device))
    return copy


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

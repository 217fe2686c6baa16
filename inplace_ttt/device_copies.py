"""Copies index tensors from the host to a device, for the op and its kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a host tensor on a device. Every CUDA stream may read the copy.

    On a GPU the host waits for this copy alone, and not for the work queued on the device.
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

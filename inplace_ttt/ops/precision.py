"""The precision of the fast-weight state."""

import contextlib
from contextlib import AbstractContextManager

import torch


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for all others: a running sum in bf16 loses most of a small update."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast would take the state to half precision; there is none on the meta device, where `plan` runs the op."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)

"""The precision of the fast-weight state."""

import torch


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for all others: a running sum in bf16 loses most of a small update."""
    return torch.float64 if dtype == torch.float64 else torch.float32

"""Which weights a memory or an adapter belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """sha256 over the values, in order; in bfloat16, so that a model loaded in another precision is still the same model."""
    digest = hashlib.sha256()
    for tensor in tensors:
        same_for_all = tensor.detach().to("cpu", torch.bfloat16) if tensor.is_floating_point() else tensor.detach().cpu()
        digest.update(same_for_all.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

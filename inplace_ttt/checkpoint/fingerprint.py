"""Which weights a session or an adapter belongs to."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..layer.quantised import readable_parameters
from ..surgery import fast_weights

PIECE = 1024
"""Numbers of every other parameter that a fingerprint looks at."""


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """sha256 over the values, in order; in bfloat16, so that a model loaded in another precision is still the same model."""
    digest = hashlib.sha256()
    for tensor in tensors:
        same_for_all = tensor.detach().to("cpu", torch.bfloat16) if tensor.is_floating_point() else tensor.detach().cpu()
        digest.update(same_for_all.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint_of(model: nn.Module) -> str:
    """sha256 of what gives a session its meaning: W0, conv and P of every TTT layer, and a piece of every other parameter.

    Quantised weights are left out.
    """
    whole = (p for module in fast_weights(model).values() for _, p in readable_parameters(module))
    pieces = (p.detach().reshape(-1)[:PIECE] for _, p in readable_parameters(model))
    return fingerprint(itertools.chain(whole, pieces))

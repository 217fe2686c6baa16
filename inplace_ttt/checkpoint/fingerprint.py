"""Fingerprints of weights. A session or an adapter records the fingerprint of its model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..layer.quantized import readable_parameters
from ..surgery import fast_weights

PIECE = 1024
"""Number of values that a fingerprint takes from each parameter outside the TTT layers."""


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Returns the sha256 over the tensors' values, in order, rounded to bfloat16.

    Rounding a model to bfloat16 does not change its fingerprint. Conversion to float16 and back does.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(rounded(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def rounded(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU, floating-point values rounded to bfloat16.

    The result does not depend on the dtype in which the weight was loaded.
    """
    return tensor.detach().to("cpu", torch.bfloat16) if tensor.is_floating_point() else tensor.detach().cpu()


def looked_at(model: nn.Module) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yields the tensors of a fingerprint, in order: name, tensor, number of values to use (None: all).

    They are W0, conv, P and all measured tensors of every TTT layer, and the first values of every other
    parameter. Quantized weights are left out.
    """
    layers = {id(module) for module in fast_weights(model).values()}
    for prefix, module in model.named_modules():
        if id(module) in layers:
            yield from ((f"{prefix}.{name}", p, None) for name, p in readable_parameters(module))
            yield from ((f"{prefix}.ttt.{name}", buffer, None) for name, buffer in module.ttt.named_buffers())
    yield from ((name, p, PIECE) for name, p in readable_parameters(model))


def fingerprint_of(model: nn.Module) -> str:
    """Returns the fingerprint of a model in memory."""
    return fingerprint(p.detach().reshape(-1)[:most] for _, p, most in looked_at(model))

"""Which weights a session or an adapter belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..layer.quantised import readable_parameters
from ..surgery import fast_weights

PIECE = 1024
"""Numbers of every other parameter that a fingerprint looks at."""


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """sha256 over the values, in order, rounded to bfloat16: a model rounded to that is the same, one that
    went through float16 is not."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(rounded(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def rounded(tensor: Tensor) -> Tensor:
    """On the CPU, floating point in bfloat16: what is the same for all who load a weight."""
    return tensor.detach().to("cpu", torch.bfloat16) if tensor.is_floating_point() else tensor.detach().cpu()


def looked_at(model: nn.Module) -> Iterator[tuple[str, Tensor, int | None]]:
    """Name, value, and how many numbers of it (None: all) of what gives a session its meaning, in order.

    W0, conv and P of every TTT layer, all that was measured for it, and a piece of every parameter. Quantised
    weights are left out.
    """
    layers = {id(module) for module in fast_weights(model).values()}
    for prefix, module in model.named_modules():
        if id(module) in layers:
            yield from ((f"{prefix}.{name}", p, None) for name, p in readable_parameters(module))
            yield from ((f"{prefix}.ttt.{name}", buffer, None) for name, buffer in module.ttt.named_buffers())
    yield from ((name, p, PIECE) for name, p in readable_parameters(model))


def fingerprint_of(model: nn.Module) -> str:
    """The fingerprint of a model in memory."""
    return fingerprint(p.detach().reshape(-1)[:most] for _, p, most in looked_at(model))

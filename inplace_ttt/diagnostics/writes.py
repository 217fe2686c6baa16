"""How far writes move a layer's weight, measured on the keys and targets of a forward as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..context import ForwardContext
from ..fast_linear import FastWeight
from ..ops import state_dtype
from ..ops.reference import clip_factor
from ..surgery import fast_weights


@dataclass(frozen=True)
class WriteHealth:
    """One layer's writes over the longest document of a forward.

    chunks: complete ones. state_ratio: η‖S‖/‖W0‖ after all of them. write_ratio: the largest η‖c_jV_jᵀZ_j‖/‖W0‖.
    clipped: fraction of chunks whose delta was clipped.
    """

    chunks: int
    state_ratio: float
    write_ratio: float
    clipped: float


@contextmanager
def observed(model: nn.Module, found: dict[int, WriteHealth]) -> Iterator[None]:
    """Within it every forward of a converted model leaves its writes' health in `found`, layer by layer."""

    def observe(layer: FastWeight, z: Tensor, v: Tensor, context: ForwardContext) -> None:
        found[layer.fast.layer] = write_health(layer, z, v, context)

    layers = fast_weights(model).values()
    for layer in layers:
        layer.fast.observer = observe
    try:
        yield
    finally:
        for layer in layers:
            layer.fast.observer = None


@torch.no_grad()
def write_health(layer: FastWeight, z: Tensor, v: Tensor, context: ForwardContext) -> WriteHealth:
    """Health of a layer's writes with keys [B, T, h] and targets [B, T, d], while its weight is at hand."""
    layout, accurate, tau = context.part(), state_dtype(z.dtype), layer.tau()
    row, span = max(((r, s) for r, spans in enumerate(layout.documents) for s in spans), key=lambda at: at[1][1] - at[1][0])
    state = z.new_zeros(v.shape[-1], z.shape[-1], dtype=accurate)
    largest, clipped, chunks = state.new_zeros(()), 0, 0
    for chunk in filter(layout.is_complete, layout.chunks(span)):
        here = slice(*chunk)
        delta = v[row, here].to(accurate).T @ z[row, here].to(accurate)
        factor = clip_factor(delta, tau)
        largest = torch.maximum(largest, factor * torch.linalg.vector_norm(delta))
        state.add_(delta.mul_(factor))
        clipped, chunks = clipped + int(factor < 1), chunks + 1
    w0 = layer.matrix()
    scale = layer.eta / float(torch.linalg.vector_norm(w0, dtype=accurate)) if w0 is not None else float("nan")
    return WriteHealth(chunks, scale * float(torch.linalg.vector_norm(state)), scale * float(largest), clipped / max(1, chunks))

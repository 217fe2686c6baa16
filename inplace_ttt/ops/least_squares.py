"""Ridge regression from sums (extension). A read uses the best linear map from keys to targets so far.

The state is two sums in one matrix [d + r, r], B = Σ c_j V_jᵀK_j above G = Σ c_j K_jᵀK_j. It is a sum over
chunks, as in the paper, so it can be reset, split over ranks and streamed in the same way. A chunk is read
with M = B (G + λI)⁻¹, which minimizes

    Σ c_j ‖V_j - K_jMᵀ‖² + λ‖M‖²

Shapes:

    k        [B, T, r]        keys K
    v        [B, T, d]        targets V
    gate     [B, T]           β, or None
    state    [B, d + r, r]    B above G; float32, or float64 for float64 inputs
    out      [B, T, d]        O

For the keys K of a chunk:

    forward     Y = K (G + λI)⁻¹        O = η Y Bᵀ
    backward    X = η dO B (G + λI)⁻¹   dK = X   dB = η dOᵀY   dG = -YᵀX

Only the symmetric part of dG counts: for G = KᵀK the gradient of K is K (dG + dGᵀ).

With a gate β, M minimizes a sum in which token t counts β_t times. Both products then have βK_j as their
second factor.

In the backward, the gradient of the sums is itself a sum, which runs from the last chunk to the first. Chunks
are processed in groups with one running sum, and nothing is stored per chunk (`least_squares_walk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout import ChunkLayout, Span
from ..rules import RidgeRule
from .least_squares_gradients import Gradients
from .least_squares_walk import Walk
from .precision import in_full_precision


def fast_weight(
    k: Tensor,
    v: Tensor,
    *,
    eta: float,
    layout: ChunkLayout,
    rule: RidgeRule,
    gate: Tensor | None = None,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns η K_i M_iᵀ [B, T, d] and the final state [B, d + r, r], or None without `return_state`.

    k are the keys [B, T, r], v the targets [B, T, d]. The other arguments are those of
    `inplace_ttt.ops.fast_weight`.
    """
    out, state = _LeastSquares.apply(k, v, gate, initial_state, float(eta), clip, rule, layout, return_state)
    return out, state if return_state else None


def sum_of_writes(
    k: Tensor, v: Tensor, spans: Sequence[Span | None], *, layout: ChunkLayout, rule: RidgeRule,
    clip: float | Tensor | None = None, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the state [B, d + r, r] after the complete chunks of one span per row, or zero without a span.

    Each span starts at a chunk's first token. Differentiable once in k [B, T, r], v [B, T, d] and gate [B,
    T].
    """
    return _SumOfWrites.apply(k, v, gate, spans, 1.0, clip, rule, layout, True)


class _LeastSquares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, gate: Tensor | None, initial_state: Tensor | None, eta: float,
        clip: float | Tensor | None, rule: RidgeRule, layout: ChunkLayout, return_state: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.save_for_backward(k, v, gate, initial_state)
        ctx.settings = eta, clip, rule, layout, return_state
        ctx.set_materialize_grads(False)
        with in_full_precision(k.device):
            return Walk(k, v, gate, initial_state, *ctx.settings).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        return *gradients(d_out, d_state, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


def gradients(
    d_out: Tensor | None, d_state: Tensor | None, k: Tensor, v: Tensor, gate: Tensor | None,
    initial_state: Tensor | None, eta: float, clip: float | Tensor | None, rule: RidgeRule,
    layout: ChunkLayout, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of k, v, gate and initial_state."""
    with in_full_precision(k.device):
        walk = Walk(k, v, gate, initial_state, eta, clip, rule, layout, return_state)
        return walk.backward(torch.zeros_like(v) if d_out is None else d_out, d_state)


class _SumOfWrites(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, gate: Tensor | None, spans: Sequence[Span | None], *settings: Any
    ) -> Tensor:
        ctx.save_for_backward(k, v, gate)
        ctx.spans, ctx.settings = spans, settings
        walk = Walk(k, v, gate, None, *settings)
        with in_full_precision(k.device):
            return torch.stack([walk.sum_over(row, span or (0, 0)) for row, span in enumerate(spans)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_state: Tensor) -> tuple[Tensor | None, ...]:
        k, v, gate = ctx.saved_tensors
        walk = Walk(k, v, gate, None, *ctx.settings)
        into = Gradients.of(k, v, gate)
        with in_full_precision(k.device):
            for row, span in enumerate(ctx.spans):
                for group in walk.groups(span or (0, 0), walk.layout.chunk_size):
                    if group.is_complete:
                        walk.through_write(row, group, d_state[row].expand(group.parts, -1, -1), into)
        return into.k.to(k.dtype), into.v, into.gate, None, None, None, None, None, None

"""The form that keeps W0's row norms in each read (extension). It is the walk of `chunked` over the raw sum
S.

A chunk is read with M = (diag(s)(W0 + ηS) - W0)/η. Then Z W0ᵀ + η Z Mᵀ = Z (diag(s)(W0 + ηS))ᵀ. Writes,
resets and the sum over ranks do not change. The backward subtracts each write again, which recovers the S
that each chunk had read. So it stores nothing per chunk.

    z       [B, T, h]
    v       [B, T, d]
    w0      [d, h]
    s       [d, 1]       ‖row of W0‖ / ‖row of W0 + ηS‖
    S, M    [d, h]       the state's dtype
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..layout import ChunkLayout, Span
from ..rules import SumRule
from .chunked import Walk
from .norms import keeping_row_norms, through_row_norms
from .precision import without_autocast


def fast_weight(
    z: Tensor,
    v: Tensor,
    w0: Tensor,
    *,
    eta: float,
    layout: ChunkLayout,
    rule: SumRule,
    initial_state: Tensor | None = None,
    clip: float | Tensor | None = None,
    return_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns η Z_i M_iᵀ [B, T, d], to be added to Z W0ᵀ, and the final state [B, d, h] if `return_state`.

    The arguments are those of `inplace_ttt.ops.fast_weight`. `w0` [d, h] is the matrix whose row norms are
    kept.
    """
    out, state = _KeepingRowNorms.apply(z, v, w0, initial_state, float(eta), clip, layout, return_state, rule)
    return out, state if return_state else None


class _KeepingRowNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, v: Tensor, w0: Tensor, initial_state: Tensor | None, eta: float,
        clip: float | Tensor | None, layout: ChunkLayout, return_state: bool, rule: SumRule,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.save_for_backward(z, v, w0, initial_state)
        ctx.settings = eta, clip, layout, return_state, rule
        ctx.set_materialize_grads(False)
        with without_autocast(z.device):
            return _Walk(z, v, None, initial_state, *ctx.settings, w0=w0).forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Tensor | None, ...]:
        z, v, w0, initial_state = ctx.saved_tensors
        with without_autocast(z.device):
            walk = _Walk(z, v, None, initial_state, *ctx.settings, w0=w0)
            dz, dv, _, d_initial = walk.backward(torch.zeros_like(v) if d_out is None else d_out, d_state)
        return dz, dv, walk.d_w0.to(w0.dtype), d_initial, None, None, None, None, None


@dataclass(eq=False, kw_only=True)
class _Walk(Walk):
    """A walk that keeps the row norms of w0 [d, h] and accumulates w0's gradient in `d_w0`."""

    w0: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.w0 = self.w0.to(self.dtype)
        self.d_w0 = torch.zeros_like(self.w0)

    def read_with(self, carry: Tensor) -> Tensor:
        return keeping_row_norms(carry, self.w0, self.eta)

    def through_writes(
        self,
        row: int,
        number: int,
        chunks: list[Span],
        carry: Tensor | None,
        d_out: Tensor,
        d_carry: Tensor,
        dz: Tensor,
        dv: Tensor,
    ) -> None:
        for chunk in reversed(chunks):
            if self.is_written(chunk, row, number):
                self.through_write(row, chunk, d_carry, dz, dv)
                if carry is not None and chunk is not chunks[-1]:
                    carry -= self.add_delta(None, row, chunk)
            if carry is None or (chunk is chunks[0] and self.start_carry(row, number) is None):
                continue  # nothing was written before this chunk
            keys, grad = (x[row, chunk[0] : chunk[1]].to(self.dtype) for x in (self.z, d_out))
            d_state, d_w0 = through_row_norms(grad.T @ keys, carry, self.w0, self.eta)
            d_carry += d_state
            self.d_w0 += d_w0

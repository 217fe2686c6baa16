"""The target's convolution inside chunks, with a hand-written backward that stores only its inputs.

Shapes:

    x            [B, T, d]    out and dx too
    conv         [d, 1, k]
    chunk_ids    [B, T]       int32; -1 for padding
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunk_conv(x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> Tensor:
    """Computes `inplace_ttt.ops.chunk_conv`. chunk_ids [B, T] is -1 for padding, whose output is zero."""
    return _ChunkConv.apply(x, conv, chunk_ids, first_tap)


class _ChunkConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, conv: Tensor, chunk_ids: Tensor, first_tap: int) -> Tensor:
        ctx.save_for_backward(x, conv, chunk_ids)
        ctx.first_tap = first_tap
        out = torch.zeros_like(x)
        for tap, (here, there, inside) in enumerate(_taps(chunk_ids, first_tap, conv.shape[-1])):
            out[:, here].addcmul_(torch.where(inside, x[:, there], 0), conv[:, 0, tap])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, conv, chunk_ids = ctx.saved_tensors
        dx = torch.zeros_like(x)
        d_conv = torch.zeros_like(conv)
        for tap, (here, there, inside) in enumerate(_taps(chunk_ids, ctx.first_tap, conv.shape[-1])):
            grad = torch.where(inside, d_out[:, here], 0)
            dx[:, there].addcmul_(grad, conv[:, 0, tap])
            source = torch.where(inside, x[:, there], 0)  # padding may contain any value, also NaN
            d_conv[:, 0, tap] = (grad * source).sum(
                dim=(0, 1), dtype=torch.float32 if x.dtype != torch.float64 else None
            )
        return dx, d_conv, None, None


def _taps(chunk_ids: Tensor, first_tap: int, kernel_size: int) -> list[tuple[slice, slice, Tensor]]:
    """Returns for each tap: the tokens that use it, the tokens that it reads, and a mask [B, n, 1].

    The mask is True where both tokens lie in one chunk.
    """
    length = chunk_ids.shape[1]
    taps = []
    for offset in range(first_tap, first_tap + kernel_size):
        reach = max(length - abs(offset), 0)
        here = slice(max(-offset, 0), max(-offset, 0) + reach)
        there = slice(max(offset, 0), max(offset, 0) + reach)
        inside = (chunk_ids[:, here] == chunk_ids[:, there]) & (chunk_ids[:, here] >= 0)
        taps.append((here, there, inside.unsqueeze(-1)))
    return taps

"""The chunk-isolated depthwise convolution and its backward, each in one pass over its inputs.

    out_t = Σ_j conv_j ∘ x_{t+f+j}      over the taps whose token lies in t's chunk; f: first tap's offset

It reads its input once and writes its result once, which moves 2 · N · d numbers. Plain torch makes 5 to 6
passes over these numbers per tap. The gradient of x is the same convolution with reversed taps. The gradient
of conv is summed in float32, block by block, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .support import INTERPRETED

_TOKENS, _CHANNELS = (8, 16) if INTERPRETED else (64, 64)
_TOKENS_A_SUM = 4 * _TOKENS if INTERPRETED else 32 * _TOKENS
_TOKENS_OF_TAPS = _TOKENS // 2
"""Tokens per tile for the gradient of the taps.

The number is small, because the registers hold all taps of a tile at once.
"""


@triton.jit
def _chunk_of(ids, t, length):
    """Returns the chunk numbers of tokens t, or -1 outside every chunk and outside the row."""
    return tl.load(ids + t, mask=(t >= 0) & (t < length), other=-1)


@triton.jit(do_not_specialize=["length", "first_tap"])
def convolve_kernel(
    x, conv, ids, out, length, d, first_tap, x_row, x_token, conv_stride,
    REVERSED: tl.constexpr, TAPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens by BC channels of one row.

    With REVERSED, tap j reads token t - first_tap - j, which is the transposed convolution.
    """
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ids += row * length
    mine = _chunk_of(ids, t, length)
    sums = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(TAPS):
        there = t - first_tap - j if REVERSED else t + first_tap + j
        inside = (mine >= 0) & (_chunk_of(ids, there, length) == mine)
        source = tl.load(
            x + row * x_row + there.to(tl.int64)[:, None] * x_token + c[None, :],
            mask=inside[:, None] & (c < d)[None, :],
            other=0.0,
        ).to(tl.float32)
        sums += source * tl.load(conv + c * conv_stride + j, mask=c < d, other=0.0).to(tl.float32)[None, :]
    out += (row * length + t.to(tl.int64))[:, None] * d + c[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=(t < length)[:, None] & (c < d)[None, :])


@triton.jit(do_not_specialize=["length", "first_tap"])
def taps_gradient_kernel(
    d_out, x, ids, parts, length, d, first_tap, g_row, g_token, x_row, x_token,
    TAPS: tl.constexpr, TAPS_ROOM: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: Σ_t d_out_t ∘ x_{t+f+j} over BLOCKS · BT tokens of one row, for BC channels.

    parts: [programs, TAPS, d].
    """
    row = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ids += row * length
    parts += (row * tl.num_programs(0) + tl.program_id(0)) * TAPS * d
    taps = tl.arange(0, TAPS_ROOM)[:, None]
    sums = tl.zeros((TAPS_ROOM, BC), tl.float32)
    for block in range(BLOCKS):
        t = (tl.program_id(0) * BLOCKS + block) * BT + tl.arange(0, BT)
        mine = _chunk_of(ids, t, length)
        real = (mine >= 0)[:, None] & (c < d)[None, :]
        grad = tl.load(
            d_out + row * g_row + t.to(tl.int64)[:, None] * g_token + c[None, :], mask=real, other=0.0
        ).to(tl.float32)
        # two neighboring taps read the same rows of x except one, so most rows come from the cache
        for j in tl.static_range(TAPS):
            there = t + first_tap + j
            inside = ((mine >= 0) & (_chunk_of(ids, there, length) == mine))[:, None] & (c < d)[None, :]
            source = tl.load(
                x + row * x_row + there.to(tl.int64)[:, None] * x_token + c[None, :], mask=inside, other=0.0
            )
            # the gradient outside the tap's tokens may be NaN, so it is masked too
            part = tl.sum(tl.where(inside, grad, 0.0) * source.to(tl.float32), axis=0)
            sums += tl.where(taps == j, part[None, :], 0.0)
    tl.store(parts + taps * d + c[None, :], sums, mask=(taps < TAPS) & (c < d)[None, :])


def convolve(x: Tensor, conv: Tensor, ids: Tensor, first_tap: int, reverse: bool = False) -> Tensor:
    """Convolves x [B, T, d] with conv [d, 1, k], in x's dtype; ids [B, T] int32.

    reverse: compute the transpose.
    """
    batch, length, d = x.shape
    out = torch.empty(batch, length, d, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    convolve_kernel[(triton.cdiv(length, _TOKENS), triton.cdiv(d, _CHANNELS), batch)](
        x, conv, ids, out, length, d, first_tap, x.stride(0), x.stride(1), conv.stride(0),
        REVERSED=reverse, TAPS=conv.shape[-1], BT=_TOKENS, BC=_CHANNELS,
    )  # fmt: skip
    return out


def taps_gradient(d_out: Tensor, x: Tensor, ids: Tensor, first_tap: int, taps: int) -> Tensor:
    """Returns the gradient of conv [d, 1, taps], float32."""
    batch, length, d = x.shape
    programs = triton.cdiv(length, _TOKENS_A_SUM)
    parts = torch.empty(batch * programs, taps, d, dtype=torch.float32, device=x.device)
    if parts.numel():
        taps_gradient_kernel[(programs, triton.cdiv(d, _CHANNELS), batch)](
            d_out, x, ids, parts, length, d, first_tap,
            d_out.stride(0), d_out.stride(1), x.stride(0), x.stride(1),
            TAPS=taps, TAPS_ROOM=triton.next_power_of_2(taps), BT=_TOKENS_OF_TAPS, BC=_CHANNELS,
            BLOCKS=_TOKENS_A_SUM // _TOKENS_OF_TAPS,
        )  # fmt: skip
    return parts.sum(dim=0).T.unsqueeze(1)

"""Computes ‖AᵀB‖_F² of each chunk from its Gram matrices as ⟨AAᵀ, BBᵀ⟩, without the delta AᵀB.

The C × C matrices are symmetric, so half of their tiles are computed: C²(d + h) / 2 multiply-adds per chunk.
The delta would take C·d·h.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .support import INTERPRETED
from .tuning import Tile, capability, run_tuned, tiles


@triton.jit
def _gram(
    x,
    first,
    second,
    in_first,
    in_second,
    width,
    stride,
    PRECISION: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
):
    """Returns the (B, B) tile x[first] x[second]ᵀ, float32; first and second are int64 tokens."""
    deep = tl.arange(0, BK)
    sums = tl.zeros((B, B), tl.float32)
    for k in range(0, width, BK):
        inside = (k + deep < width)[None, :]
        left = tl.load(
            x + first[:, None] * stride + (k + deep)[None, :], mask=in_first[:, None] & inside, other=0.0
        )
        right = tl.load(
            x + second[:, None] * stride + (k + deep)[None, :], mask=in_second[:, None] & inside, other=0.0
        )
        sums = tl.dot(left, right.T, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["chunk"])
def squared_norms_kernel(
    a, b, starts, out, chunk, d, h, a_stride, b_stride,
    PRECISION: tl.constexpr, B: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """One program: tile (i, j), i ≥ j, of one chunk's two Gram matrices.

    out: [chunks, tiles · tiles], 0 above the diagonal.
    """
    count = tl.cdiv(chunk, B)
    number, place = tl.program_id(0) // (count * count), tl.program_id(0) % (count * count)
    i, j = place // count, place % count
    part = 0.0
    if i >= j:
        token = tl.load(starts + number).to(tl.int64)
        first, second = i * B + tl.arange(0, B), j * B + tl.arange(0, B)
        in_first, in_second = first < chunk, second < chunk
        values = _gram(a, token + first, token + second, in_first, in_second, d, a_stride, PRECISION, B, BK)
        keys = _gram(b, token + first, token + second, in_first, in_second, h, b_stride, PRECISION, B, BK)
        part = tl.sum(values * keys) * tl.where(i == j, 1.0, 2.0)
    tl.store(out + tl.program_id(0), part)


def squared_norms(a: Tensor, b: Tensor, starts: Tensor, chunk: int) -> Tensor:
    """Returns ‖AᵀB‖_F² [n] float32 of the chunks of a [N, d] and b [N, h].

    starts: the chunks' first tokens [n] int32 or int64.
    """
    assert a.stride(1) == b.stride(1) == 1 and not starts.is_floating_point()

    def launch(tile: Tile) -> Tensor:
        count = triton.cdiv(chunk, tile.rows)
        out = torch.empty(len(starts), count * count, dtype=torch.float32, device=a.device)
        squared_norms_kernel[(out.numel(),)](  # one axis, because the other axes are limited to 65,535
            a, b, starts, out, chunk, a.shape[1], b.shape[1], a.stride(0), b.stride(0),
            PRECISION="ieee" if a.dtype == torch.float32 else "tf32", B=tile.rows, BK=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    candidates = tiles(a.dtype, capability(a.device), square=True)
    key = ("gram", a.device, a.dtype, a.shape[1], b.shape[1], chunk.bit_length())
    return run_tuned(key, candidates, launch, repeatable=True, device=a.device).sum(dim=1).clamp(min=0)


@triton.jit(do_not_specialize=["chunk"])
def inner_products_kernel(
    a, b, starts, out, chunk, n, a_stride, b_stride, BT: tl.constexpr, BC: tl.constexpr
):
    """One program: Σ a ∘ b over BT tokens of one chunk; out [chunks, ⌈chunk / BT⌉]."""
    count = tl.cdiv(chunk, BT)
    t = tl.program_id(0) % count * BT + tl.arange(0, BT)
    token = (tl.load(starts + tl.program_id(0) // count).to(tl.int64) + t)[:, None]
    sums = tl.zeros((BT, BC), tl.float32)
    for c in range(0, n, BC):
        columns = c + tl.arange(0, BC)[None, :]
        inside = (t < chunk)[:, None] & (columns < n)
        left = tl.load(a + token * a_stride + columns, mask=inside, other=0.0).to(tl.float32)
        sums += left * tl.load(b + token * b_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(sums))


def inner_products(a: Tensor, b: Tensor, starts: Tensor, chunk: int) -> Tensor:
    """Returns Σ a ∘ b [n] float32 over the chunks of a, b [N, n] that start at the tokens `starts` [n]."""
    assert a.stride(1) == b.stride(1) == 1
    tokens, columns = (8, 32) if INTERPRETED else (16, 128)
    out = torch.empty(len(starts), triton.cdiv(chunk, tokens), dtype=torch.float32, device=a.device)
    inner_products_kernel[(out.numel(),)](
        a, b, starts, out, chunk, a.shape[1], a.stride(0), b.stride(0), BT=tokens, BC=columns
    )
    return out.sum(dim=1)

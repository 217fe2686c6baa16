"""The inverse L⁻¹ of the Cholesky factor of many matrices at once, A = L Lᵀ, by products of halves; a kernel
takes what is left.

With L₁ that of A's first half, L₂ that of A₂₂ - L₂₁L₂₁ᵀ:

    L₂₁ = A₂₁L₁⁻ᵀ        L⁻¹ = [L₁⁻¹, 0; -L₂⁻¹L₂₁L₁⁻¹, L₂⁻¹]

which is 4/3 r³ multiply-adds in plain products where a factor and its solves take r³/3 of them in steps that
wait for each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .support import INTERPRETED, on_device_of

_BLOCK = 8 if INTERPRETED else 64
"""Rows of a matrix that are inverted one after the other, in a program's registers."""
_LEAF = 2 * _BLOCK
"""Rows of a matrix that one program takes."""


@triton.jit
def _inverted(a, n, B: tl.constexpr):
    """L⁻¹ (B, B) of the first n rows of A (B, B), of which the lower triangle is read, and one on the
    diagonal after them."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    x = tl.where(rows == columns, 1.0, 0.0)
    for j in range(n):
        column = tl.sum(tl.where(columns == j, a, 0.0), axis=1)
        scale = 1.0 / tl.sqrt(tl.sum(tl.where(tl.arange(0, B) == j, column, 0.0)))
        # L's column under its diagonal
        below = tl.where((tl.arange(0, B) > j) & (tl.arange(0, B) < n), column * scale, 0.0)[:, None]
        row = tl.sum(tl.where(rows == j, x, 0.0), axis=0)[None, :] * scale
        x = tl.where(rows == j, row, x - below * row)
        a -= below * tl.trans(below)
    return x


@triton.jit
def leaf_kernel(
    matrices, inverses, n, a_matrix, a_row, x_matrix, x_row, HALVES: tl.constexpr, B: tl.constexpr
):
    """One program: L⁻¹ of one matrix of n ≤ B rows, or of two times as many by its HALVES."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    a = matrices + tl.program_id(0).to(tl.int64) * a_matrix + rows * a_row + columns
    x = inverses + tl.program_id(0).to(tl.int64) * x_matrix + rows * x_row + columns
    inside, first = (rows < n) & (columns < n), tl.minimum(n, B)
    x_first = _inverted(tl.load(a, mask=inside, other=0.0), first, B)
    tl.store(x, x_first, mask=inside & (rows >= columns))
    if HALVES:
        rest = n - B
        in_corner, in_second = rows < rest, (rows < rest) & (columns < rest)
        below = tl.dot(
            tl.load(a + B * a_row, mask=in_corner, other=0.0), tl.trans(x_first), input_precision="ieee"
        )
        second = tl.load(a + B * a_row + B, mask=in_second, other=0.0)
        x_second = _inverted(second - tl.dot(below, tl.trans(below), input_precision="ieee"), rest, B)
        tl.store(x + B * x_row + B, x_second, mask=in_second & (rows >= columns))
        corner = tl.dot(x_second, tl.dot(below, x_first, input_precision="ieee"), input_precision="ieee")
        tl.store(x + B * x_row, -corner, mask=in_corner)


def inverse_factor(matrices: Tensor) -> Tensor:
    """L⁻¹ [n, r, r] float32, lower, of positive definite matrices [n, r, r], which are overwritten; NaN where
    one is not.

    Products are of full float32 only where torch is told so.
    """
    assert matrices.dim() == 3 and matrices.dtype == torch.float32 and matrices.stride(-1) == 1
    inverses = torch.zeros(matrices.shape, dtype=torch.float32, device=matrices.device)
    with on_device_of(matrices):
        _fill(inverses, matrices)
    return inverses


def _fill(inverse: Tensor, matrix: Tensor) -> None:
    r = matrix.shape[-1]
    if r <= _LEAF:
        strides = (*matrix.stride()[:2], *inverse.stride()[:2])
        halves = r > _BLOCK
        leaf_kernel[(len(matrix),)](
            matrix, inverse, r, *strides, HALVES=halves, B=_BLOCK, num_warps=8 if halves else 4
        )
        return
    half = -(-r // (2 * _LEAF)) * _LEAF  # of whole leaves
    first, second, corner = inverse[:, :half, :half], inverse[:, half:, half:], inverse[:, half:, :half]
    _fill(first, matrix[:, :half, :half])
    below = torch.bmm(matrix[:, half:, :half], first.mT)
    rest = matrix[:, half:, half:]
    _fill(second, torch.baddbmm(rest, below, below.mT, alpha=-1, out=rest))
    torch.baddbmm(corner, second, torch.bmm(below, first), beta=0, alpha=-1, out=corner)

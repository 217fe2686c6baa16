"""The inverse L⁻¹ of the Cholesky factor of many matrices at once, A = L Lᵀ, by products of halves; a kernel takes what is left.

With L₁ that of A's first half, L₂ that of A₂₂ - L₂₁L₂₁ᵀ:

    L₂₁ = A₂₁L₁⁻ᵀ        L⁻¹ = [L₁⁻¹, 0; -L₂⁻¹L₂₁L₁⁻¹, L₂⁻¹]

which is 4/3 r³ multiply-adds in plain products where a factor and its solves take r³/3 of them in steps that wait for each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .support import INTERPRETED

_LEAF = 8 if INTERPRETED else 64
"""Rows of a matrix that one program inverts in its registers."""


@triton.jit
def leaf_kernel(matrices, inverses, n, a_matrix, a_row, x_matrix, x_row, B: tl.constexpr):
    """One program: L⁻¹ of one matrix of n ≤ B rows, of which the lower triangle is read; a row of A and of L⁻¹ at a time."""
    number = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    inside = (rows < n) & (columns < n)
    one = tl.where(rows == columns, 1.0, 0.0)
    a = tl.load(matrices + number * a_matrix + rows * a_row + columns, mask=inside, other=0.0)
    a = tl.where(inside, a, one)
    x = one
    for j in range(n):
        column = tl.sum(tl.where(columns == j, a, 0.0), axis=1)
        scale = 1.0 / tl.sqrt(tl.sum(tl.where(tl.arange(0, B) == j, column, 0.0)))
        below = tl.where(tl.arange(0, B) > j, column * scale, 0.0)[:, None]  # L's column under its diagonal
        row = tl.sum(tl.where(rows == j, x, 0.0), axis=0)[None, :] * scale
        x = tl.where(rows == j, row, x - below * row)
        a -= below * tl.trans(below)
    tl.store(inverses + number * x_matrix + rows * x_row + columns, x, mask=inside & (rows >= columns))


def inverse_factor(matrices: Tensor) -> Tensor:
    """L⁻¹ [n, r, r] float32, lower, of positive definite matrices [n, r, r], which are overwritten; NaN where one is not.

    Products are of full float32 only where torch is told so.
    """
    assert matrices.dim() == 3 and matrices.dtype == torch.float32 and matrices.stride(-1) == 1
    inverses = torch.zeros(matrices.shape, dtype=torch.float32, device=matrices.device)
    _fill(inverses, matrices)
    return inverses


def _fill(inverse: Tensor, matrix: Tensor) -> None:
    r = matrix.shape[-1]
    if r <= _LEAF:
        leaf_kernel[(len(matrix),)](matrix, inverse, r, *matrix.stride()[:2], *inverse.stride()[:2], B=_LEAF, num_warps=4)
        return
    half = -(-r // (2 * _LEAF)) * _LEAF
    first, second, corner = inverse[:, :half, :half], inverse[:, half:, half:], inverse[:, half:, :half]
    _fill(first, matrix[:, :half, :half])
    below = torch.bmm(matrix[:, half:, :half], first.mT)
    rest = matrix[:, half:, half:]
    _fill(second, torch.baddbmm(rest, below, below.mT, alpha=-1, out=rest))
    torch.baddbmm(corner, second, torch.bmm(below, first), beta=0, alpha=-1, out=corner)

"""The inverses L⁻¹ of the Cholesky factors A = L Lᵀ of many matrices, by recursive halving.

Let L₁ be the Cholesky factor of A₁₁, and L₂ the factor of A₂₂ - L₂₁L₂₁ᵀ:

    L₂₁ = A₂₁L₁⁻ᵀ        L⁻¹ = [L₁⁻¹, 0; -L₂⁻¹L₂₁L₁⁻¹, L₂⁻¹]

The halving needs 2/3 r³ multiply-adds, in plain products. A factorization and its solves would need only
r³/3, but in steps that wait for each other. The kernel inverts the small blocks at which the halving stops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .support import INTERPRETED, on_device_of

_BLOCK = 8 if INTERPRETED else 64
"""Number of rows that a program inverts one after the other in its registers."""
_LEAF = 2 * _BLOCK
"""Number of rows of the largest matrix that one program inverts."""


@triton.jit
def _inverted(a, n, B: tl.constexpr):
    """Returns L⁻¹ (B, B) of the first n rows of A (B, B), with ones on the diagonal after them.

    Only the lower triangle of A is read.
    """
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
    """One program: L⁻¹ of one matrix of n ≤ B rows, or with HALVES of n ≤ 2B rows, by its two halves."""
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
    """Returns L⁻¹, lower triangular, for positive definite matrices [n, r, r] float32, which are overwritten.

    The products have full float32 precision only if torch's settings require it.

    Args:
        matrices: Positive definite matrices [n, r, r] float32; the last dimension is contiguous.

    Returns:
        L⁻¹ [n, r, r] float32; NaN for a matrix that is not positive definite.
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
    half = -(-r // (2 * _LEAF)) * _LEAF  # a multiple of the leaf
    first, second, corner = inverse[:, :half, :half], inverse[:, half:, half:], inverse[:, half:, :half]
    _fill(first, matrix[:, :half, :half])
    below = torch.bmm(matrix[:, half:, :half], first.mT)
    rest = matrix[:, half:, half:]
    _fill(second, torch.baddbmm(rest, below, below.mT, alpha=-1, out=rest))
    torch.baddbmm(corner, second, torch.bmm(below, first), beta=0, alpha=-1, out=corner)

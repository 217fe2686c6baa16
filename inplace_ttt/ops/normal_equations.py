"""The normal equations of least squares: rows (G + λI)⁻¹ for a sum G of KᵀK, by the Cholesky factor L of G + λI.

A CPU solves with L, block after block. A GPU would wait for each of those blocks: there L⁻¹ is made of as many matrices at once as
fit, by products of halves, and rows (G + λI)⁻¹ = (rows L⁻ᵀ) L⁻¹ is two products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .precision import in_full_precision, product

_CROWDED = 512
"""Columns of so many numbers, or a multiple, share few lines of a CPU's cache: a Cholesky factor of 1,024 takes two thirds longer."""
_LEAF = 64
"""Rows of a matrix that is not halved further: a GPU factors so many in one kernel."""


def by_products(device: torch.device) -> bool:
    """Whether a device solves by L⁻¹ and products."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Factor:
    """L of G + λI [..., r, r], or L⁻¹ where a device solves by products; both lower, and on a CPU of some directions more."""

    matrix: Tensor
    is_inverse: bool

    def solve(self, *of: Tensor) -> tuple[Tensor, ...]:
        """rows (G + λI)⁻¹ [..., n, r] of each of several rows [..., n, r], in the factor's dtype."""
        if self.is_inverse:
            return tuple(product(product(rows, self.matrix.mT), self.matrix) for rows in of)
        rows = torch.cat([rows.to(self.matrix.dtype) for rows in of], dim=-2) if len(of) > 1 else of[0].to(self.matrix.dtype)
        r, more = rows.shape[-1], self.matrix.shape[-1] - rows.shape[-1]
        # From the right, where the rows lie: on a CPU that takes half to two thirds of what `cholesky_solve` of their transpose takes.
        half = torch.linalg.solve_triangular(self.matrix.mT, pad(rows, (0, more)) if more else rows, upper=True, left=False)
        solved = torch.linalg.solve_triangular(self.matrix, half, upper=False, left=False)[..., :r]
        return solved.split([rows.shape[-2] for rows in of], dim=-2)


def factor(gram: Tensor, damping: float) -> Factor:
    """Of G + λI for G [..., r, r]; not a number where G is no sum of KᵀK.

    On a CPU the factor is that of a few directions more, which no key has, where it would be crowded.

    To λ comes what rounding may have taken from the sum, 8 ε tr G (1e-6 of it in float32), a constant to the gradient: one key
    that is written a hundred thousand times would else hide a small λ.
    """
    is_inverse = by_products(gram.device)
    lost = 8 * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    more = 8 if not is_inverse and gram.shape[-1] % _CROWDED == 0 else 0
    damped = pad(gram, (0, more, 0, more)) if more else gram.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_((damping + lost)[..., None])
    return Factor(_inverse_factor(damped), True) if is_inverse else Factor(_cholesky(damped), False)


def readout(state: Tensor, damping: float | None) -> Tensor:
    """M [..., d, r], what a key is read with, of a state [..., d + r, r]; without damping, the paper's, the state itself."""
    if damping is None:
        return state
    r = state.shape[-1]
    with in_full_precision(state.device):
        return factor(state[..., -r:, :], damping).solve(state[..., :-r, :])[0]


def read_once(state: Tensor, keys: Tensor, damping: float) -> Tensor:
    """What keys [..., n, r] read, η left out, of a state [..., d + r, r]: [..., n, d] in the state's dtype.

    It takes n solves where M takes d.
    """
    r = state.shape[-1]
    with in_full_precision(state.device):
        return factor(state[..., -r:, :], damping).solve(keys)[0] @ state[..., :-r, :].mT


def _cholesky(matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)  # without a look at `failed`, for which a GPU would be waited for
    factor.diagonal(dim1=-2, dim2=-1).add_(torch.where(failed == 0, 0.0, torch.nan)[..., None])  # every solve divides by each of them
    return factor


def _inverse_factor(matrix: Tensor) -> Tensor:
    """L⁻¹ [..., r, r]. With the halves of a matrix, L₁ that of its first and L₂ that of A₂₂ - L₂₁L₂₁ᵀ:

    L₂₁ = A₂₁L₁⁻ᵀ        L⁻¹ = [L₁⁻¹, 0; -L₂⁻¹L₂₁L₁⁻¹, L₂⁻¹]
    """
    inverse = torch.zeros_like(matrix)
    _fill(inverse, matrix)
    return inverse


def _fill(inverse: Tensor, matrix: Tensor) -> None:
    r = matrix.shape[-1]
    if r <= _LEAF:
        one = torch.eye(r, dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        inverse.copy_(torch.linalg.solve_triangular(_cholesky(matrix), one, upper=False))
        return
    half = -(-r // (2 * _LEAF)) * _LEAF
    first, second = inverse[..., :half, :half], inverse[..., half:, half:]
    _fill(first, matrix[..., :half, :half])
    below = matrix[..., half:, :half] @ first.mT
    _fill(second, matrix[..., half:, half:] - below @ below.mT)
    inverse[..., half:, :half] = second @ (below @ first).neg_()

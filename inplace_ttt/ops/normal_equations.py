"""The normal equations of least squares: rows (G + λI)⁻¹ for a sum G of KᵀK, by the Cholesky factor L of G +
λI.

A CPU solves with L, block after block. A GPU would wait for each of those blocks: there L⁻¹ is made of as
many matrices at once as fit, and rows (G + λI)⁻¹ = (rows L⁻ᵀ) L⁻¹ is two products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..rules import RidgeRule
from . import triton
from .precision import in_full_precision
from .products import Operand, product

_CROWDED = 512
"""Columns of so many numbers, or a multiple, share few lines of a CPU's cache: a Cholesky factor of 1,024
takes two thirds longer."""


def by_products(gram: Tensor) -> bool:
    """Whether matrices like these are solved with by L⁻¹ and products."""
    return gram.dtype == torch.float32 and triton.factors(gram.device)


@dataclass(frozen=True)
class Factor:
    """L of G + λI [..., r, r], on a CPU of some directions more; or L⁻¹, as what is multiplied."""

    matrix: Tensor | Operand

    def solve(self, *of: Tensor) -> tuple[Tensor, ...]:
        """rows (G + λI)⁻¹ [..., n, r] of each of several rows [..., n, r], in the sums' dtype."""
        if isinstance(self.matrix, Operand):
            return tuple(self._by_products(rows, self.matrix) for rows in of)
        rows = (
            torch.cat([rows.to(self.matrix.dtype) for rows in of], dim=-2)
            if len(of) > 1
            else of[0].to(self.matrix.dtype)
        )
        r, more = rows.shape[-1], self.matrix.shape[-1] - rows.shape[-1]
        # From the right, where the rows lie: on a CPU that takes half to two thirds of what `cholesky_solve`
        # of their transpose takes.
        half = torch.linalg.solve_triangular(
            self.matrix.mT, pad(rows, (0, more)) if more else rows, upper=True, left=False
        )
        solved = torch.linalg.solve_triangular(self.matrix, half, upper=False, left=False)[..., :r]
        return solved.split([rows.shape[-2] for rows in of], dim=-2)

    def _by_products(self, rows: Tensor, inverse: Operand) -> Tensor:
        beside, flat = inverse.parts[0].dtype, rows.reshape(-1, *rows.shape[-2:])
        half = product(Operand.of(flat, beside), inverse.mT)
        return product(Operand.of(half, beside), inverse).view(rows.shape)


def factor(gram: Tensor, ridge: float, beside: torch.dtype | None = None) -> Factor:
    """Of G + λI for G [..., r, r]; not a number where G is no sum of KᵀK. beside: the dtype of what is solved
    (default: G's).

    On a CPU the factor is that of a few directions more, which no key has, where it would be crowded.

    To λ comes what rounding may have taken from the sum, 8 ε tr G (1e-6 of it in float32), a constant to the
    gradient: one key that is written a hundred thousand times would else hide a small λ.
    """
    by_inverse = by_products(gram)
    lost = 8 * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    more = 8 if not by_inverse and gram.shape[-1] % _CROWDED == 0 and gram.device.type == "cpu" else 0
    damped = pad(gram, (0, more, 0, more)) if more else gram.clone(memory_format=torch.contiguous_format)
    damped.diagonal(dim1=-2, dim2=-1).add_((ridge + lost)[..., None])
    if by_inverse:
        inverse = triton.inverse_factor(damped.view(-1, *damped.shape[-2:]))
        return Factor(Operand.of(inverse, beside or gram.dtype))
    # without a look at `failed`, for which a GPU would be waited for
    matrix, failed = torch.linalg.cholesky_ex(damped)
    # every solve divides by each of them
    matrix.diagonal(dim1=-2, dim2=-1).add_(torch.where(failed == 0, 0.0, torch.nan)[..., None])
    return Factor(matrix)


def readout(state: Tensor, rule: RidgeRule) -> Tensor:
    """M [..., d, r], what a key is read with, of a state [..., d + r, r]."""
    r = state.shape[-1]
    with in_full_precision(state.device):
        return factor(state[..., -r:, :], rule.ridge).solve(state[..., :-r, :])[0]


def read_once(state: Tensor, keys: Tensor, rule: RidgeRule) -> Tensor:
    """What keys [..., n, r] read, η left out, of a state [..., d + r, r]: [..., n, d] in the state's dtype.

    It takes n solves where M takes d.
    """
    r = state.shape[-1]
    with in_full_precision(state.device):
        return factor(state[..., -r:, :], rule.ridge).solve(keys)[0] @ state[..., :-r, :].mT

"""The normal equations of ridge regression. They compute rows (G + λI)⁻¹ for a sum G of KᵀK.

L is the Cholesky factor of G + λI. A CPU solves with L block by block. A GPU would have to wait for each of
these blocks. So on a GPU L⁻¹ is computed, for as many matrices in one batch as fit into memory. Two products
then compute rows (G + λI)⁻¹ = (rows L⁻ᵀ) L⁻¹.

    gram, L, L⁻¹    [..., r, r]        the state's dtype
    rows            [..., n, r]
    state           [..., d + r, r]    the sum B of VᵀK above G
    M               [..., d, r]
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
"""Matrix sizes that are a multiple of this number are padded on a CPU.

Their columns share few lines of the CPU's cache. A Cholesky factor of size 1,024 then takes two thirds
longer.
"""


def by_products(gram: Tensor) -> bool:
    """Returns True if matrices like this one are solved by products with L⁻¹."""
    return gram.dtype == torch.float32 and triton.factors(gram.device)


@dataclass(frozen=True)
class Factor:
    """The factor L of G + λI [..., r, r] (on a CPU padded by a few directions), or L⁻¹ as an `Operand`."""

    matrix: Tensor | Operand

    def solve(self, *of: Tensor) -> tuple[Tensor, ...]:
        """Returns rows (G + λI)⁻¹ [..., n, r] for each argument [..., n, r], in the sums' dtype."""
        if isinstance(self.matrix, Operand):
            return tuple(self._by_products(rows, self.matrix) for rows in of)
        rows = (
            torch.cat([rows.to(self.matrix.dtype) for rows in of], dim=-2)
            if len(of) > 1
            else of[0].to(self.matrix.dtype)
        )
        r, more = rows.shape[-1], self.matrix.shape[-1] - rows.shape[-1]
        # A solve from the right needs no transpose of the rows. On a CPU it takes half to two thirds of the
        # time of `cholesky_solve` on the transpose.
        half = torch.linalg.solve_triangular(
            self.matrix.mT, pad(rows, (0, more)) if more else rows, upper=True, left=False
        )
        solved = torch.linalg.solve_triangular(self.matrix, half, upper=False, left=False)[..., :r]
        return solved.split([rows.shape[-2] for rows in of], dim=-2)

    def _by_products(self, rows: Tensor, inverse: Operand) -> Tensor:
        beside, flat = inverse.parts[0].dtype, rows.reshape(-1, *rows.shape[-2:])
        half = product(Operand.of(flat, beside), inverse.mT)
        return product(Operand.of(half, beside), inverse).view(rows.shape)


def damping(ridge: float, trace: Tensor) -> Tensor:
    """Returns λ [...] as it is added to a sum G of KᵀK.

    It is at least 8 ε tr G (1e-6 tr G in float32), a bound on the rounding error of G. A smaller λ would be
    lost after one key was written a hundred thousand times.

    Args:
        ridge: λ.
        trace: Trace of G [...].
    """
    return (8 * torch.finfo(trace.dtype).eps * trace).clamp(min=ridge)


def factor(
    gram: Tensor, ridge: float, beside: torch.dtype | None = None, added: Tensor | None = None
) -> Factor:
    """Factors G + λI for G [..., r, r]. The factor is NaN where G + λI is not positive definite.

    λ is that of `damping`. The gradient treats it as a constant.

    On a CPU, sizes that would share few cache lines are padded by a few directions that no key uses.

    Args:
        gram: G, a sum of KᵀK.
        ridge: λ.
        beside: Dtype of the rows that will be solved (default: G's).
        added: Trace [...] of writes that are read before they are added to G; None for none.
    """
    by_inverse = by_products(gram)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    damped_by = damping(ridge, trace if added is None else trace + added)
    more = 8 if not by_inverse and gram.shape[-1] % _CROWDED == 0 and gram.device.type == "cpu" else 0
    damped = pad(gram, (0, more, 0, more)) if more else gram.clone(memory_format=torch.contiguous_format)
    damped.diagonal(dim1=-2, dim2=-1).add_(damped_by[..., None])
    if by_inverse:
        inverse = triton.inverse_factor(damped.view(-1, *damped.shape[-2:]))
        return Factor(Operand.of(inverse, beside or gram.dtype))
    return Factor(cholesky(damped))


def cholesky(matrix: Tensor) -> Tensor:
    """Returns the Cholesky factor L [..., n, n]. Where there is none, its diagonal is NaN.

    Every solution is NaN then, because a solve divides by each diagonal entry.
    """
    # the host does not read `failed`, because it would have to wait for the GPU
    lower, failed = torch.linalg.cholesky_ex(matrix)
    lower.diagonal(dim1=-2, dim2=-1).add_(torch.where(failed == 0, 0.0, torch.nan)[..., None])
    return lower


def readout(state: Tensor, rule: RidgeRule) -> Tensor:
    """Returns M [..., d, r], the matrix that keys are multiplied by, from a state [..., d + r, r]."""
    r = state.shape[-1]
    with in_full_precision(state.device):
        return factor(state[..., -r:, :], rule.ridge).solve(state[..., :-r, :])[0]


def read_once(state: Tensor, keys: Tensor, rule: RidgeRule) -> Tensor:
    """Returns the reads [..., n, d], without η, of keys [..., n, r] from a state [..., d + r, r].

    The result has the state's dtype. It needs n solves, where the matrix M needs d solves.
    """
    r = state.shape[-1]
    with in_full_precision(state.device):
        return factor(state[..., -r:, :], rule.ridge).solve(keys)[0] @ state[..., :-r, :].mT

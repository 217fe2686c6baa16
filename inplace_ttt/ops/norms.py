"""Norms of TTT-NTP (extension).

A write is divided by its spectral norm. A read scales each row of W0 + ηS to the norm of W0's row. All
functions are differentiable. Shapes: delta, state S and U = W0 + ηS [..., d, h], w0 [d, h], row factors [...,
d, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

_POWER_STEPS, _LEAST_NORM, _LEAST_LENGTH, _LEAST_ROW = 5, 1e-6, 1e-8, 1e-5


def spectral_norm(delta: Tensor) -> Tensor:
    """Estimates σ̂ [..., 1, 1], the spectral norm of deltas D [..., d, h], at least 1e-6.

    The estimate is uᵀDv after five steps of power iteration from the mean row.
    """
    v = normalize(delta.mean(dim=-2, keepdim=True).mT, dim=-2, eps=_LEAST_LENGTH)
    u = delta @ v
    for _ in range(_POWER_STEPS):
        u = normalize(delta @ v, dim=-2, eps=_LEAST_LENGTH)
        v = normalize(delta.mT @ u, dim=-2, eps=_LEAST_LENGTH)
    return (u.mT @ delta @ v).clamp(min=_LEAST_NORM)


def row_factors(total: Tensor, w0: Tensor) -> tuple[Tensor, Tensor]:
    """Returns s = ‖W0_r‖ / ‖U_r‖ for the rows r of U [..., d, h] and W0 [d, h], and ‖U_r‖; each [..., d, 1].

    s = 1 for rows of U with a norm of at most 1e-5.
    """
    norms = torch.linalg.vector_norm(total, dim=-1, keepdim=True)
    wanted = torch.linalg.vector_norm(w0, dim=-1, keepdim=True)
    large = norms > _LEAST_ROW
    return torch.where(large, wanted / torch.where(large, norms, 1.0), 1.0), norms


def keeping_row_norms(state: Tensor, w0: Tensor, eta: float) -> Tensor:
    """Returns M [..., d, h] such that W0 + ηM is W0 + ηS with each row scaled to the norm of W0's row.

    Args:
        state: S [..., d, h].
        w0: W0 [d, h].
        eta: η.
    """
    if eta == 0:
        return state
    total = w0 + eta * state
    return (row_factors(total, w0)[0] * total - w0) / eta


def through_row_norms(d_change: Tensor, state: Tensor, w0: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of S and W0, each [d, h], given the gradient `d_change` of ηM."""
    total = w0 + eta * state
    factor, norms = row_factors(total, w0)
    along = torch.where(
        norms > _LEAST_ROW, (d_change * total).sum(-1, keepdim=True) / norms.clamp(min=_LEAST_ROW), 0.0
    )
    d_total = factor * d_change - (factor * along / norms.clamp(min=_LEAST_ROW)) * total
    return eta * d_total, d_total - d_change + along * normalize(w0, dim=-1, eps=torch.finfo(w0.dtype).tiny)

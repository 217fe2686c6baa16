"""What least squares should read, straight from its definition: the yardstick of the probes where a module
declares it."""

from __future__ import annotations

import torch
from torch import Tensor


def key_size(ridge: float | None) -> float:
    """Norm of the probes' keys: 1, or of least squares about √λ, so that neither λ nor what keys write hides
    the other."""
    return 1.0 if ridge is None else max(ridge**0.5, 0.01)


def least_squares_reads(keys: Tensor, values: Tensor, chunk: int, ridge: float) -> Tensor:
    """K_i M_iᵀ [T, d] with M_i the minimum of Σ ‖V_j - K_j Mᵀ‖² + λ‖M‖² over all chunks j < i; keys [T, h],
    values [T, d].

    M is solved for as a stack of rows, K above √λ, in coordinates of the keys' span, where it lies.
    """
    out = torch.zeros_like(values)
    for start in range(chunk, len(keys), chunk):
        span = torch.linalg.qr(keys[:start].T)[0]
        rows = torch.cat([keys[:start] @ span, ridge**0.5 * torch.eye(span.shape[1], dtype=keys.dtype)])
        wanted = torch.cat([values[:start], values.new_zeros(span.shape[1], values.shape[1])])
        solution = torch.linalg.lstsq(rows, wanted).solution
        out[start : start + chunk] = keys[start : start + chunk] @ span @ solution
    return out

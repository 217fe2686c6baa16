"""Least-squares reads computed from their definition, as the reference for modules that declare this rule."""

from __future__ import annotations

import torch
from torch import Tensor


def key_size(ridge: float | None) -> float:
    """Returns the norm of the probes' keys: 1, or about √λ under least squares.

    With keys of about √λ, λ and the writes have equal weight in a read, so neither hides the other.
    """
    return 1.0 if ridge is None else max(ridge**0.5, 0.01)


def least_squares_reads(keys: Tensor, values: Tensor, chunk: int, ridge: float) -> Tensor:
    """Returns the reads K_i M_iᵀ [T, d], in the dtype of `values`.

    M_i minimizes Σ ‖V_j - K_j Mᵀ‖² + λ‖M‖² over all chunks j < i. `lstsq` solves the system of the stacked
    rows K and √λ I, in coordinates of the keys' span, which contains M's rows.

    Args:
        keys: K [T, h], floating point.
        values: V [T, d], the targets.
        chunk: tokens per chunk.
        ridge: λ.
    """
    out = torch.zeros_like(values)
    for start in range(chunk, len(keys), chunk):
        span = torch.linalg.qr(keys[:start].T)[0]
        rows = torch.cat([keys[:start] @ span, ridge**0.5 * torch.eye(span.shape[1], dtype=keys.dtype)])
        wanted = torch.cat([values[:start], values.new_zeros(span.shape[1], values.shape[1])])
        solution = torch.linalg.lstsq(rows, wanted).solution
        out[start : start + chunk] = keys[start : start + chunk] @ span @ solution
    return out

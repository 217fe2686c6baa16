"""The clip c = min(1, τ / ‖D‖) of each chunk's delta D = VᵀZ, and the gradient through it, without making D.

With R the gradient of cD: dD = c (R - k D), where k = ⟨D, R⟩ / ‖D‖² if c < 1, else 0. Since Z Dᵀ = (Z Zᵀ) V and
V D = (V Vᵀ) Z, the second term costs 2 C²(d + h) multiply-adds a chunk, against 3 C·d·h through D itself: less for chunks
below 1.5 dh / (d + h) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .documents import Document
from .gram import squared_norms


def chunk_factors(v: Tensor, z: Tensor, documents: Sequence[Document], chunk: int, tau: Tensor) -> dict[Document, tuple[Tensor, Tensor]]:
    """For each document (c_j, ‖D_j‖²) [writes] of its written chunks, float32; v [N, d], z [N, h], tau []."""
    writing = [document for document in documents if document.writes]
    starts = [document.start + j * chunk for document in writing for j in range(document.writes)]
    if not starts:
        return {}
    squares = squared_norms(v, z, torch.tensor(starts, device=z.device), chunk)
    norms = squares.sqrt()
    exceeds = norms > tau
    factors = torch.where(exceeds, tau / torch.where(exceeds, norms, 1.0), 1.0)
    counts = [document.writes for document in writing]
    return dict(zip(writing, zip(factors.split(counts), squares.split(counts), strict=True), strict=True))


def add_clip_gradient(
    keys: Tensor, values: Tensor, slots: Tensor, factors: Tensor, squares: Tensor, d_keys: Tensor, d_values: Tensor
) -> None:
    """Turn d_values, which is Z Rᵀ, into Z dDᵀ, and add V dD to d_keys; all [n, C, …], slots R [n, d, h], factors, squares [n]."""
    for z, v, r, c, square, dz, dv in zip(keys, values, slots, factors.view(-1, 1, 1), squares, d_keys, d_values, strict=True):
        along = (dv.float() * v.float()).sum() / torch.where(square > 0, square, 1.0)
        k = torch.where(c < 1, along, 0.0)
        dz.addmm_((c * v).to(v.dtype), r)
        dz.addmm_((-c * k * (v @ v.T)).to(v.dtype), z)
        dv.copy_(c * dv)
        dv.addmm_((-c * k * (z @ z.T)).to(v.dtype), v)

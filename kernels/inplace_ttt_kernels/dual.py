"""The dual form, for short documents: their chunks read earlier ones by way of scores, and no state is made.

    O_i = Z_i W0ᵀ + η Σ_{j<i} (Z_i Z_jᵀ) V_j

With A the scores Z Zᵀ of each chunk with the chunks before it, zero elsewhere, and B the same of dO Vᵀ,

    O += η A V      dZ += η (B + Bᵀ) Z      dV = η Aᵀ dO

All scores are made, then half are cleared: a document is short where even that is less work than its walk. Forward that is
T²(d + h) multiply-adds against T·d·h, backward 2T²(d + h) against 3T·d·h. The products are cuBLAS's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .documents import Document


def longest(d: int, h: int) -> int:
    """The tokens up to which a document is short, for W0 [d, h]."""
    return d * h // (d + h)


def add_reads(z: Tensor, v: Tensor, document: Document, eta: float, out: Tensor) -> None:
    """Add what the document's chunks read beside W0 to out [N, d]; z [N, h], v [N, d]."""
    here = slice(document.start, document.stop)
    out[here].addmm_(_scores(z[here], z[here], document.chunk), v[here], alpha=eta)


def add_gradients(z: Tensor, v: Tensor, d_out: Tensor, document: Document, eta: float, dz: Tensor, dv: Tensor) -> None:
    """Add to dz [N, h] and set dv [N, d] in the document; d_out [N, d]."""
    here = slice(document.start, document.stop)
    dv[here].addmm_(_scores(z[here], z[here], document.chunk).T, d_out[here], beta=0, alpha=eta)
    through = _scores(d_out[here], v[here], document.chunk)
    dz[here].addmm_(through + through.T, z[here], alpha=eta)


def _scores(x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """x yᵀ [T, T] where the column's chunk comes before the row's, else 0."""
    number = torch.arange(len(x), device=x.device) // chunk
    return (x @ y.T).masked_fill_(number[:, None] <= number, 0)

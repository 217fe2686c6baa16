"""The dual form, for short documents. Chunks read earlier chunks through scores, without any state.

    O_i = Z_i W0ᵀ + η Σ_{j<i} (Z_i Z_jᵀ) V_j

Let A be the scores Z Zᵀ of each chunk with the chunks before it, zero elsewhere, and B the same for dO Vᵀ.
Then

    O += η A V      dZ += η (B + Bᵀ) Z      dV = η Aᵀ dO

Half of the scores are zero, and their tiles are skipped. A document is short if its nonzero scores need less
work than its walk. In the forward, the scores need T²(d + h) / 2 multiply-adds and the walk needs T·d·h. In
the backward, it is T²(d + h) against 3T·d·h. All short documents share one launch per product.
"""

from __future__ import annotations

from torch import Tensor

from .documents import Plan
from .products import Problems, combine, packed, scores


def longest(d: int, h: int) -> int:
    """Returns the length in tokens of the longest short document, for W0 [d, h]."""
    return 2 * d * h // (d + h)


def add_reads(z: Tensor, v: Tensor, plan: Plan, eta: float, out: Tensor) -> None:
    """Adds the reads of the short documents' chunks, without W0, to out [N, d]; z [N, h], v [N, d]."""
    if which := _short(plan, z):
        combine(scores(z, z, which, "earlier", chunk=plan.chunk, alpha=eta), v, which, out, "earlier")


def add_gradients(
    z: Tensor, v: Tensor, d_out: Tensor, plan: Plan, eta: float, dz: Tensor, dv: Tensor
) -> None:
    """Adds to dz [N, h] and sets dv [N, d] in the short documents; d_out [N, d]."""
    if which := _short(plan, z):
        read = scores(z, z, which, "earlier", chunk=plan.chunk, alpha=eta)
        combine(read, d_out, which, dv, "earlier", transposed=True, add=False)
        through = scores(d_out, v, which, "earlier and later", chunk=plan.chunk, alpha=eta)
        combine(through, z, which, dz, "earlier and later")


def _short(plan: Plan, z: Tensor) -> Problems | None:
    return (
        packed(tuple((document.start, document.stop - document.start) for document in plan.short), z)
        if plan.short
        else None
    )

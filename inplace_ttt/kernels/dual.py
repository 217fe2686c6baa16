"""The dual form, for short documents: their chunks read earlier ones by way of scores, and no state is made.

    O_i = Z_i W0ᵀ + η Σ_{j<i} (Z_i Z_jᵀ) V_j

With A the scores Z Zᵀ of each chunk with the chunks before it, zero elsewhere, and B the same of dO Vᵀ,

    O += η A V      dZ += η (B + Bᵀ) Z      dV = η Aᵀ dO

Half of the scores are zero, and their tiles are skipped. A document is short where the others are less work
than its walk: forward T²(d + h) / 2 multiply-adds against T·d·h, backward T²(d + h) against 3T·d·h. All short
documents take one launch a product.
"""

from __future__ import annotations

from torch import Tensor

from .documents import Plan
from .products import Problems, combine, packed, scores


def longest(d: int, h: int) -> int:
    """The tokens up to which a document is short, for W0 [d, h]."""
    return 2 * d * h // (d + h)


def add_reads(z: Tensor, v: Tensor, plan: Plan, eta: float, out: Tensor) -> None:
    """Add what the short documents' chunks read beside W0 to out [N, d]; z [N, h], v [N, d]."""
    if which := _short(plan, z):
        combine(scores(z, z, which, "earlier", chunk=plan.chunk, alpha=eta), v, which, out, "earlier")


def add_gradients(
    z: Tensor, v: Tensor, d_out: Tensor, plan: Plan, eta: float, dz: Tensor, dv: Tensor
) -> None:
    """Add to dz [N, h] and set dv [N, d] in the short documents; d_out [N, d]."""
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

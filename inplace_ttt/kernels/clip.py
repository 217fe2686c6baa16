"""The clip c = min(1, τ / ‖D‖) of each chunk's delta D = VᵀZ, and its gradient, without computing D.

Let R be the gradient of cD. Then dD = c (R - k D), where k = ⟨D, R⟩ / ‖D‖² if c < 1, else 0. The backward
walk (`walk`) computes cR. So dV = Z (cR)ᵀ and dZ = V (cR) are known, and ⟨D, cR⟩ = ⟨dV, V⟩. The second term
uses

    Z Dᵀ = (Z Zᵀ) V        V D = (V Vᵀ) Z

and costs 2 C²(d + h) multiply-adds per chunk. With D itself it would cost 3 C·d·h. That is more for chunks
below 1.5 dh / (d + h) tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .documents import Plan
from .gram import inner_products, squared_norms
from .products import combine, packed, scores
from .schedule import to_device

_SCORES = 1 << 28
"""Largest number of bytes of the Gram matrices that one launch computes."""


@dataclass(frozen=True)
class Clips:
    """The clips of all n writes of a call, in order.

    Attributes:
        starts: First token of each write.
        places: `starts` as a tensor [n], int32, on the device.
        chunk: Tokens per chunk.
        factors: c [n] float32.
        squares: ‖D‖² [n] float32.
    """

    starts: tuple[int, ...]
    places: Tensor
    chunk: int
    factors: Tensor
    squares: Tensor


def clips_of(v: Tensor, z: Tensor, plan: Plan, tau: Tensor) -> Clips | None:
    """Computes the clips of v [N, d], z [N, h] and the bound tau []; None if nothing is written."""
    if not plan.written[-1]:
        return None
    starts, places = _starts(plan, z.device)
    squares = squared_norms(v, z, places, plan.chunk)
    norms = squares.sqrt()
    return Clips(
        starts, places, plan.chunk, torch.where(norms > tau, tau / norms, torch.ones_like(norms)), squares
    )


@lru_cache(maxsize=64)
def _starts(plan: Plan, device: torch.device) -> tuple[tuple[int, ...], Tensor]:
    starts = tuple(
        document.start + j * plan.chunk for document in plan.documents for j in range(document.writes)
    )
    return starts, to_device(starts, device)


def add_gradient(clips: Clips, z: Tensor, v: Tensor, dz: Tensor, dv: Tensor) -> None:
    """Subtracts from dv and dz the gradient through the clip's own factor.

    dv [N, d] holds Z (cR)ᵀ and dz [N, h] includes V (cR).
    """
    along = inner_products(dv, v, clips.places, clips.chunk)
    pull = -torch.where(
        (clips.factors < 1) & (clips.squares > 0), along / clips.squares, torch.zeros_like(along)
    )
    at_once = max(_SCORES // (clips.chunk * clips.chunk * z.itemsize), 1)
    for first in range(0, len(clips.starts), at_once):
        starts = clips.starts[first : first + at_once]
        which = packed(tuple((start, clips.chunk) for start in starts), z)
        factors = pull[first : first + at_once]
        for of, times, into in ((z, v, dv), (v, z, dz)):
            combine(
                scores(of, of, which, "all", chunk=clips.chunk, factors=factors), times, which, into, "all"
            )

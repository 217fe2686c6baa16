"""The clip c = min(1, τ / ‖D‖) of each chunk's delta D = VᵀZ, and the gradient through it, without making D.

With R the gradient of cD: dD = c (R - k D), where k = ⟨D, R⟩ / ‖D‖² if c < 1, else 0. The walk gives cR, so
that dV = Z (cR)ᵀ and dZ = V (cR) are there before, and ⟨D, cR⟩ = ⟨dV, V⟩. Since Z Dᵀ = (Z Zᵀ) V and V D = (V
Vᵀ) Z, the second term costs 2 C²(d + h) multiply-adds a chunk, against 3 C·d·h through D itself: less for
chunks below 1.5 dh / (d + h) tokens.
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
"""Bytes of Gram matrices at a time."""


@dataclass(frozen=True)
class Clips:
    """Of every write of the call, in order: its first token, also on the device, and c and ‖D‖² [n]
    float32."""

    starts: tuple[int, ...]
    places: Tensor
    chunk: int
    factors: Tensor
    squares: Tensor


def clips_of(v: Tensor, z: Tensor, plan: Plan, tau: Tensor) -> Clips | None:
    """v [N, d], z [N, h], tau []; None where nothing is written."""
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
    """Take from dv [N, d], which is Z (cR)ᵀ, and from dz [N, h] what goes through the clip's own factor."""
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

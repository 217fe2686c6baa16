"""Finds the directions in which a layer's activations vary most, in one pass over a text.

The second moment is Σ = Σ_t z_t z_tᵀ [h, h]. A text of up to 1,024 tokens is stored itself. For a longer
text, Σ is summed, unless a sketch is smaller. The sketch sums Y = Σ Ω [h, l] for l = 2r directions Ω, and
then Σ ≈ Y (Ωᵀ Y)⁻¹ Yᵀ (Nyström).

The spectrum of activations falls slowly, and a random Ω captures too little of it. So each time the number of
tokens has doubled, the range of the approximation becomes the new Ω. The approximation so far stays the same.
The sketch of the following tokens uses the most important directions. This is a subspace iteration whose
steps read different parts of the text. The center is subtracted at the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InPlaceTTTError

_OVERSAMPLING = 2
"""Columns of the sketch, as a multiple of r.

At r = h / 6, in SmolLM2's layers, the directions found have over 99 % of the variance of the best directions.
With a multiple of 3/2 they have 98 % or more, and with a random Ω throughout 95 %.
"""

_ROUNDINGS = 4
"""Shift of ΩᵀY in units of float32's epsilon.

If the text is one token repeated, the eigenvalues of ΩᵀY reach down to -0.7 of one unit.
"""

_AT_ONCE = 1024
"""Number of tokens that are converted to float32 together. A text of at most this length is stored itself."""


class Directions(NamedTuple):
    """Leading directions of the second moment of z - ‖z‖c, or of z itself with c = 0, in float32.

    c = E[‖z‖z] / E[‖z‖²] minimizes E‖z - ‖z‖c‖². It plays the role of the mean, for z of different norms.

    The eigenvalues from a sketch are too low. Their sum is too low by a few percent, and the last ones by
    10 % or more. The trace is exact. For a text of up to 1,024 tokens everything is exact.

    Attributes:
        values: the r largest eigenvalues [r], descending.
        vectors: their orthonormal vectors [h, r].
        trace: trace of the second moment.
        center: c [h].
    """

    values: Tensor
    vectors: Tensor
    trace: float
    center: Tensor


class LeadingDirections:
    """Accumulates activations z [..., h] of any dtype.

    It stores the smaller of h² and 4 r h float32 values, and a text of up to 1,024 tokens.

    Args:
        width: h.
        rank: r, the number of directions.
        device: device of the sums.
        centered: subtract ‖z‖c. If False, c is zero.

    Raises:
        InPlaceTTTError: if the rank is not between 1 and h.
    """

    def __init__(
        self, width: int, rank: int, device: torch.device | str = "cpu", *, centered: bool = True
    ) -> None:
        if not 0 < rank <= width:
            raise InPlaceTTTError(
                f"activations of width {width} do not have {rank} directions; give a rank of 1 to {width}."
            )
        columns = _OVERSAMPLING * rank
        self.rank, self.tokens, self.trace, self.centered = rank, 0, 0.0, centered
        self._next = columns
        self._onto: Tensor | None = None  # Ω; None for the identity, with which the sum is Σ itself
        if 2 * columns < width:  # drawn on the CPU, so every device has the same values
            start = torch.randn(width, columns, generator=torch.Generator().manual_seed(0)).to(device)
            self._onto = torch.linalg.qr(start).Q
        self._sum = torch.zeros(width, width if self._onto is None else columns, device=device)
        self._kept: list[Tensor] | None = None if self._onto is None else []
        self._total = torch.zeros(width, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, z: Tensor) -> None:
        """Adds tokens, z [..., h].

        Raises:
            InPlaceTTTError: if z is not finite.
        """
        for part in z.detach().reshape(-1, z.shape[-1]).split(_AT_ONCE):
            part = part.to(self._sum.device, torch.float32)
            square = float(part.square().sum())
            if not square < float("inf"):
                raise InPlaceTTTError(
                    "a down-projection's input was not finite on the calibration text; load the model in a "
                    "dtype with a larger range."
                )
            self._total += torch.linalg.vector_norm(part, dim=-1) @ part
            self.tokens, self.trace = self.tokens + len(part), self.trace + square
            if self._kept is not None and self.tokens <= _AT_ONCE:
                self._kept.append(part.clone())
                continue
            for unread in (*(self._kept or ()), part):
                self._sum.addmm_(unread.T, unread if self._onto is None else unread @ self._onto)
            self._kept = None
            if self._onto is not None and self.tokens >= self._next:
                self._onto, inner = self._range()
                self._sum, self._next = self._onto @ inner.float(), 2 * self.tokens

    @torch.no_grad()
    def found(self) -> Directions:
        """Returns the directions of the tokens added so far.

        Raises:
            InPlaceTTTError: if there are fewer tokens than directions, or all tokens are the same.
        """
        if self.tokens < self.rank:
            raise InPlaceTTTError(
                f"{self.tokens} tokens cannot determine the {self.rank} largest directions of a "
                "down-projection's input; calibrate on more tokens, or lower the rank."
            )
        square = self.trace / self.tokens
        center = self._total / self.tokens / square if square else self._total
        trace = square - square * float(center @ center)
        if not trace > 1e-6 * square:
            raise InPlaceTTTError(
                "a down-projection's input did not vary over the calibration text; give rows of a text "
                "like the one to be read."
            )
        if not self.centered:
            center, trace = torch.zeros_like(center), square
        if self._kept is not None:
            z = torch.cat(self._kept).double()
            _, sizes, turned = torch.linalg.svd(
                z - torch.linalg.vector_norm(z, dim=-1, keepdim=True) * center, full_matrices=False
            )
            return Directions(
                (sizes.square() / self.tokens)[: self.rank].float(),
                turned[: self.rank].T.float(),
                trace,
                center.float(),
            )
        basis, inner = (None, self._sum.double()) if self._onto is None else self._range()
        within = math.sqrt(square) * (center if basis is None else basis.T.double() @ center)
        values, vectors = torch.linalg.eigh(inner / self.tokens - within.outer(within))
        values, vectors = (
            values.flip(0)[: self.rank].clamp(min=0).float(),
            vectors.flip(1)[:, : self.rank].float(),
        )
        return Directions(values, vectors if basis is None else basis @ vectors, trace, center.float())

    def _range(self) -> tuple[Tensor, Tensor]:
        """Returns Q [h, l], orthonormal float32, and C [l, l], float64, with Q C Qᵀ = Y (Ωᵀ Y)⁻¹ Yᵀ.

        The tokens may be fewer than l, or repeated, so ΩᵀY is shifted above its rounding error. The shift
        keeps the directions, and lowers an eigenvalue by some millionths of the largest.
        """
        assert self._onto is not None
        small = (self._onto.T @ self._sum).double()
        small = (small + small.T) / 2
        small.diagonal().add_(
            _ROUNDINGS * torch.finfo(torch.float32).eps * self._sum.norm() + torch.finfo(torch.float32).tiny
        )
        basis, upper = torch.linalg.qr(self._sum)
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(small), upper.T.double(), upper=False)
        return basis, half.T @ half

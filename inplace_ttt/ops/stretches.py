"""Reads of several chunks from one factor of G + λI, at the start of a stretch of chunks.

Let P = (G + λI)⁻¹ at the stretch's start. A chunk reads after the writes of the stretch's earlier chunks,
whose keys count w_j times. By Woodbury's identity, for the keys K of the whole stretch:

    A = K P     U = A Kᵀ √w     I + √w U = L Lᵀ     W = L⁻¹ √w A     F = L⁻¹ √w (V - A Bᵀ)

    solved keys of a token    A - R W        R = U L⁻ᵀ at earlier chunks, else 0
    its read                  A Bᵀ + R F

The factor of [r, r] is needed once for all chunks of the stretch, and L [g, g] has only g tokens.

    keys, A, W    [n, g, r]    of n stretches with g tokens each
    U, R          [n, g, g]
    w             [n, g, 1]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rules import tokens_per_factor
from . import triton
from .normal_equations import by_products, cholesky
from .products import Operand, product


def chunks_in_stretch(chunk_size: int, d: int, r: int, device: torch.device) -> int:
    """Returns the number of chunks that read from one factor, at least one.

    On a CPU there may be fewer than `tokens_per_factor`. For g tokens, the factor takes r³ / (3 g)
    multiply-adds per token, and the products with U take about g (r + d). A CPU factors at two thirds of its
    rate of products, so g is at most where this time is least.
    """
    most = tokens_per_factor(chunk_size, r)
    if device.type == "cpu":
        most = min(most, math.isqrt(r**3 // (2 * (r + d))))
    return max(most // chunk_size, 1)


def serve_gradients(device: torch.device) -> bool:
    """Returns True if gradients are computed by stretches too. Else they have one factor per chunk.

    They need U's products twice more. On a CPU these take as long as the factors that they save.
    """
    return device.type != "cpu"


class Stretch:
    """The reads inside n stretches of equal length, in the sums' precision.

    Args:
        keys: K.
        solved: A.
        counts: w, 0 or more; None if each token counts once.
        chunk_size: tokens per chunk.
    """

    def __init__(self, keys: Tensor, solved: Tensor, counts: Tensor | None, chunk_size: int) -> None:
        self.solved, self.beside = solved, keys.dtype
        self.root = None if counts is None else counts.to(solved.dtype).sqrt()
        place = torch.arange(keys.shape[1], device=keys.device) // chunk_size
        self.is_earlier = place[:, None] > place
        across = product(self._operand(solved), keys.mT)
        if self.root is not None:
            across *= self.root.mT
        gram = self._weighed(across).clone(memory_format=torch.contiguous_format)
        gram.diagonal(dim1=-2, dim2=-1).add_(1.0)
        self.inverse: Operand | None = None
        if by_products(gram):
            self.inverse = self._operand(triton.inverse_factor(gram))
            reads = product(self._operand(across), self.inverse.mT)
        else:
            self.lower = cholesky(gram)
            # U L⁻ᵀ = L - L⁻ᵀ without weights, and L⁻ᵀ is zero at earlier chunks
            reads = (
                self.lower
                if self.root is None
                else torch.linalg.solve_triangular(self.lower.mT, across, upper=True, left=False)
            )
        self.reads = self._operand(torch.where(self.is_earlier, reads, 0.0))

    def errors(self, values: Tensor, read: Tensor | None) -> Tensor:
        """Returns F [n, g, d] of targets V [n, g, d]. `read` is A Bᵀ, or None if B is zero."""
        return self._through(values.to(self.solved.dtype) if read is None else values - read)

    def directions(self) -> Tensor:
        """Returns W [n, g, r]."""
        return self._through(self.solved)

    def inside(self, of: Tensor) -> Tensor:
        """Returns R times F or W."""
        return product(self.reads, self._operand(of))

    def seen(self, grad: Tensor, errors: Tensor) -> Operand:
        """Returns dO Fᵀ [n, g, g] at earlier chunks, else 0, for gradients dO [n, g, d] and F."""
        found = product(grad, self._operand(errors).mT)
        return self._operand(torch.where(self.is_earlier, found, 0.0))

    def _through(self, rows: Tensor) -> Tensor:
        """Returns L⁻¹ √w rows."""
        weighed = self._weighed(rows)
        if self.inverse is not None:
            return product(self.inverse, self._operand(weighed))
        return torch.linalg.solve_triangular(self.lower, weighed, upper=False)

    def _weighed(self, rows: Tensor) -> Tensor:
        return rows if self.root is None else rows * self.root

    def _operand(self, x: Tensor) -> Operand:
        return Operand.of(x, self.beside)

"""Whitened keys (extension), a fixed map of the down-projection's input that is measured on a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class WhitenedKeys(nn.Module):
    """Whitened keys k = A (z - ‖z‖ c), of r numbers per token; see `KeyWhitening`.

    They cost r h multiply-adds per token. A key is proportional to ‖z‖, as W0 z is. So a token whose z is
    almost zero reads almost nothing. That matters in a model with a norm after W0, which would enlarge even a
    small read.

    Args:
        width: h.
        rank: r.
        factory: `device` and `dtype` of the buffers.

    Attributes:
        directions: A [r, h], set by `inplace_ttt.calibrate`.
        center: c [h], set by `inplace_ttt.calibrate`.
    """

    directions: Tensor
    center: Tensor

    def __init__(self, width: int, rank: int, **factory: Any) -> None:
        super().__init__()
        self.register_buffer("directions", torch.zeros(rank, width, **factory))
        self.register_buffer("center", torch.zeros(width, **factory))

    def forward(self, z: Tensor) -> Tensor:
        """Returns the keys [..., r] of z [..., h], in z's dtype."""
        length = torch.linalg.vector_norm(
            z, dim=-1, keepdim=True, dtype=torch.promote_types(z.dtype, torch.float32)
        )
        return linear(
            torch.addcmul(z, length.to(z.dtype), self.center.to(z.dtype), value=-1),
            self.directions.to(z.dtype),
        )

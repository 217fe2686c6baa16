"""Whitened keys (extension): a fixed map of the down-projection's input, measured on a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class WhitenedKeys(nn.Module):
    """k = A (z - ‖z‖ c), r numbers a token; see `KeyWhitening`.

    directions A [r, h] and centre c [h] are buffers, filled by `inplace_ttt.calibration.calibrate`. r h
    multiply-adds a token. A key grows as its z does, as what W0 gives does: a token whose z is next to
    nothing, which a norm behind W0 makes large, reads next to nothing.
    """

    directions: Tensor
    centre: Tensor

    def __init__(self, width: int, rank: int, **factory: Any) -> None:
        super().__init__()
        self.register_buffer("directions", torch.zeros(rank, width, **factory))
        self.register_buffer("centre", torch.zeros(width, **factory))

    def forward(self, z: Tensor) -> Tensor:
        """Keys [..., r] of z [..., h], in z's dtype."""
        length = torch.linalg.vector_norm(
            z, dim=-1, keepdim=True, dtype=torch.promote_types(z.dtype, torch.float32)
        )
        return linear(
            torch.addcmul(z, length.to(z.dtype), self.centre.to(z.dtype), value=-1),
            self.directions.to(z.dtype),
        )

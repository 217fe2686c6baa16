"""Whitened keys (extension): a fixed affine map of the down-projection's input, measured on a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class WhitenedKeys(nn.Module):
    """K = A (Z - μ), r numbers a token; see `KeyWhitening`.

    directions A [r, h] and bias -Aμ [r] are buffers, filled by `inplace_ttt.calibration.calibrate`. r h multiply-adds a token.
    """

    directions: Tensor
    bias: Tensor

    def __init__(self, width: int, rank: int, **factory: Any) -> None:
        super().__init__()
        self.register_buffer("directions", torch.zeros(rank, width, **factory))
        self.register_buffer("bias", torch.zeros(rank, **factory))

    def forward(self, z: Tensor) -> Tensor:
        """Keys [..., r] of z [..., h], in z's dtype."""
        return linear(z, self.directions.to(z.dtype), self.bias.to(z.dtype))

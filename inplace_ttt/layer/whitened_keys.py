"""Whitened keys (extension): a fixed map of the down-projection's input, measured on a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import state_dtype


class WhitenedKeys(nn.Module):
    """K = s (Z - (Z B) Bᵀ), which is s (Σ + ρI)^(-1/2) Z up to the directions left out; see `KeyWhitening`.

    basis B [h, r] and scale s [] are buffers, filled by `inplace_ttt.calibration.calibrate`. 4 h r operations a token, in float32.
    """

    basis: Tensor
    scale: Tensor

    def __init__(self, width: int, rank: int | None, **factory: Any) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(width, min(rank or width, width), **factory))
        self.register_buffer("scale", torch.zeros((), **factory))

    def forward(self, z: Tensor) -> Tensor:
        """Keys [..., h] of z [..., h], in z's dtype; also maps a state [d, h] to the change of weight that it stands for."""
        wide = z.to(state_dtype(z.dtype))
        basis, scale = self.basis.to(wide.dtype), self.scale.to(wide.dtype)
        return ((wide - wide @ basis @ basis.T) * scale).to(z.dtype)

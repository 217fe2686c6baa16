"""A gate of writes (extension): how much each token counts in what least squares fits, by its whitened
key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import state_dtype
from ..ops.precision import without_autocast


class WriteGate(nn.Module):
    """β = 2σ(√r w·k + b) of keys k [..., r], between 0 and 2; 1 for all before it has learnt.

    gate [r + 1] holds w and, last, b. Whitened keys have a norm of about 1, so that √r k are numbers of about
    1, and an optimiser moves w as it moves P.
    """

    def __init__(self, rank: int, **factory: Any) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(rank + 1, **factory))

    def forward(self, keys: Tensor) -> Tensor:
        """β [...] of keys [..., r], in the dtype of states."""
        accurate = state_dtype(keys.dtype)
        weight, bias = self.gate.to(accurate).split([keys.shape[-1], 1])
        with without_autocast(keys.device):
            return 2 * torch.sigmoid(keys.to(accurate) @ weight * keys.shape[-1] ** 0.5 + bias)

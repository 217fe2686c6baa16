"""A gate of writes (extension). It computes each token's weight in the ridge regression from its key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import state_dtype
from ..ops.precision import without_autocast


class WriteGate(nn.Module):
    """The weight β = 2σ(√r w·k + b) of a token with key k, between 0 and 2. Before training it is 1.

    Whitened keys have a norm of about 1, so the entries of √r k are about 1. An optimizer then
    moves w about as it moves P.

    Args:
        rank: r.
        factory: `device` and `dtype` of the parameter.

    Attributes:
        gate: one parameter [r + 1], with w first and b last.
    """

    def __init__(self, rank: int, **factory: Any) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(rank + 1, **factory))

    def forward(self, keys: Tensor) -> Tensor:
        """Returns β [...] of keys [..., r], in the dtype of states."""
        accurate = state_dtype(keys.dtype)
        weight, bias = self.gate.to(accurate).split([keys.shape[-1], 1])
        with without_autocast(keys.device):
            return 2 * torch.sigmoid(keys.to(accurate) @ weight * keys.shape[-1] ** 0.5 + bias)

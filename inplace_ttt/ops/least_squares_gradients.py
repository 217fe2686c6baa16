"""The gradients that the walk of ridge regression collects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .precision import state_dtype


@dataclass(frozen=True)
class Gradients:
    """Gradients of keys (in the sums' precision), targets and, if present, the gate. They start at zero."""

    k: Tensor
    v: Tensor
    gate: Tensor | None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, gate: Tensor | None) -> Gradients:
        return cls(
            torch.zeros_like(k, dtype=state_dtype(k.dtype)),
            torch.zeros_like(v),
            None if gate is None else torch.zeros_like(gate),
        )

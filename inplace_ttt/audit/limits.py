"""How far a whole reading may be from what its settings declare, by the dtype that it computes in. Decided
here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import InPlaceTTTConfig

BIAS = 8
"""How often more a bias counts than scatter: rounding scatters, and a wrong factor does not."""

_BY_A_SOLVE = 3
"""How much more half precision may take where rounded keys are whitened or go through a solve."""


@dataclass(frozen=True)
class Limits:
    """Largest errors. outputs: of what a token reads, and small_model: in the small model of the audit, whose
    numbers are always alike.

    state: of what many chunks have written there. gradient: of a tensor's gradient. start: of logits before
        anything is written.
    """

    outputs: float
    small_model: float
    state: float
    gradient: float
    start: float


LIMITS: dict[torch.dtype, Limits] = {
    torch.float64: Limits(2e-3, 2e-3, 1e-6, 2e-3, 1e-6),
    torch.float32: Limits(2e-3, 2e-3, 1e-4, 2e-3, 1e-4),
    torch.bfloat16: Limits(0.04, 0.025, 0.006, 0.05, 0.04),
    torch.float16: Limits(0.005, 0.003, 0.001, 0.03, 0.005),
}
"""Half precision rounds outputs, beside which a read is about half as large: ten roundings, where sound
models show two to seven."""


def limits(dtype: torch.dtype) -> Limits:
    return LIMITS[dtype]


def room(dtype: torch.dtype, config: InPlaceTTTConfig) -> float:
    """How often more than `limits` a short reading of a small model may be off in half precision."""
    return (
        _BY_A_SOLVE
        if torch.finfo(dtype).bits < 32 and (config.ridge is not None or config.whitening is not None)
        else 1
    )


def gradient_limit(dtype: torch.dtype, config: InPlaceTTTConfig) -> float:
    rounded_solve = config.ridge is not None and config.whitening is None and torch.finfo(dtype).bits < 32
    return LIMITS[dtype].gradient * (_BY_A_SOLVE if rounded_solve else 1)

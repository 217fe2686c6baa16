"""The largest errors at which a reading still passes against its declared rule, per dtype of the computation.

All such limits are set in this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import InPlaceTTTConfig
from ..ops import state_dtype

BIAS = 8
"""Factor by which a bias counts more than scatter. Rounding causes scatter, a wrong factor causes a bias."""

_BY_A_SOLVE = 3
"""Factor on the limits of half precision for keys that are whitened or pass through a solve."""


@dataclass(frozen=True)
class Limits:
    """Largest relative errors for one dtype.

    Attributes:
        outputs: reads of a token.
        small_model: reads of a token in the audit's own small model, whose errors hardly vary.
        state: the state after many chunks.
        gradient: the gradient of one tensor.
        start: the logits before anything is written.
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
"""Limits by dtype.

Half precision rounds the outputs, and a read is about half as large as an output. The limits allow ten such
rounding errors. Correct models show two to seven.
"""

STEPS: dict[torch.dtype, float] = {
    torch.float64: 1e-4,
    torch.float32: 5e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.1,
}
"""Limits of logits after gradient steps, relative to the effect of the writes, by dtype.

Each step amplifies the rounding errors of the steps before it.
"""


def limits(dtype: torch.dtype) -> Limits:
    return LIMITS[dtype]


def room(dtype: torch.dtype, config: InPlaceTTTConfig) -> float:
    """Returns the factor on `limits` for a short reading of a small model in half precision."""
    return (
        _BY_A_SOLVE
        if torch.finfo(dtype).bits < 32 and (config.ridge is not None or config.whitening is not None)
        else 1
    )


def by_solve(gram: float, ridge: float, dtype: torch.dtype) -> float:
    """Returns the bound on the relative error that rounding causes in reads by ridge regression.

    Rounding changes G by u‖G‖, where u is the unit roundoff of states. To first order the solution changes by
    at most u κ, with the condition number κ = 1 + ‖G‖/λ. Raw keys are nearly collinear, so κ is large. For
    the probes' texts with λ = 0.03 it reaches 9e4, and the bound is 0.005 in float32. Correct layers showed
    0.1 to 0.6 of the bound. This fraction depends on the order in which the CPU's library adds products.

    Args:
        gram: ‖G‖, the largest eigenvalue of KᵀK.
        ridge: λ.
        dtype: dtype of the computation.
    """
    return torch.finfo(state_dtype(dtype)).eps / 2 * (1 + gram / ridge)


def gradient_limit(dtype: torch.dtype, config: InPlaceTTTConfig) -> float:
    rounded_solve = config.ridge is not None and config.whitening is None and torch.finfo(dtype).bits < 32
    return LIMITS[dtype].gradient * (_BY_A_SOLVE if rounded_solve else 1)

"""Test-time memories under one protocol: layers for any torch model, each in a primal form that is its law
and a fast one."""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import InPlaceTTTError
from .deltanet import DeltaNet
from .gated_linear_attention import GatedLinearAttention
from .in_place import InPlaceTTT
from .lact import LaCT
from .linear_attention import LinearAttention
from .protocol import Memory, detached, state_bytes
from .titans import Titans
from .ttt import TTTMLP, TTTLinear
from .two_layer import two_layer_dual, two_layer_primal

__all__ = [
    "MEMORIES",
    "TTTMLP",
    "DeltaNet",
    "GatedLinearAttention",
    "InPlaceTTT",
    "LaCT",
    "LinearAttention",
    "Memory",
    "TTTLinear",
    "Titans",
    "detached",
    "make",
    "state_bytes",
    "two_layer_dual",
    "two_layer_primal",
]

MEMORIES: dict[str, type[Memory[Any]]] = {
    "linear-attention": LinearAttention,
    "gla": GatedLinearAttention,
    "deltanet": DeltaNet,
    "ttt-linear": TTTLinear,
    "ttt-mlp": TTTMLP,
    "lact": LaCT,
    "titans": Titans,
    "in-place": InPlaceTTT,
}
"""The systems by the name that a recipe gives them."""


def make(name: str, dim: int, **options: Any) -> Memory[Any]:
    """The memory of that name for tokens of width dim, with its own options."""
    if name not in MEMORIES:
        raise InPlaceTTTError(f"memory {name!r} does not exist; choose one of {', '.join(MEMORIES)}.")
    known = list(inspect.signature(MEMORIES[name]).parameters)[1:]
    for option in options:
        if option not in known:
            raise InPlaceTTTError(f"{name} has no option {option!r}; it has {', '.join(known)}.")
    return MEMORIES[name](dim, **options)

"""Test-time memories with one interface. Each is a layer for any torch model, in a primal and a fast form.

The primal form defines the layer, token by token. The fast form must compute the same.
"""

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
"""The classes by their names in recipes."""


def make(name: str, dim: int, **options: Any) -> Memory[Any]:
    """Builds the memory with this name for tokens of width `dim`.

    Args:
        name: A key of `MEMORIES`.
        dim: Width of the tokens.
        **options: Options of the memory's class.

    Returns:
        The layer, [B, T, dim] to [B, T, dim].

    Raises:
        InPlaceTTTError: If the name or an option does not exist.
    """
    if name not in MEMORIES:
        raise InPlaceTTTError(f"memory {name!r} does not exist; choose one of {', '.join(MEMORIES)}.")
    known = list(inspect.signature(MEMORIES[name]).parameters)[1:]
    for option in options:
        if option not in known:
            raise InPlaceTTTError(f"{name} takes no option {option!r}; it takes {', '.join(known)}.")
    return MEMORIES[name](dim, **options)

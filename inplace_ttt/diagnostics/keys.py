"""Measures how many directions a layer's keys span, and how far the keys of two tokens coincide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..families import locate
from ..layer.fast_linear import FastWeight
from ..surgery import causal_lm, fast_weights

_AT_MOST = 1024
"""Largest number of tokens that are compared with each other."""


@dataclass(frozen=True)
class KeyHealth:
    """Keys Z of one layer.

    Attributes:
        effective: participation ratio of ZᵀZ, from 1 to min(tokens, h).
        collision: RMS cosine of the keys of two tokens.
        cosine: mean cosine of the keys of two tokens.
        width: h.
    """

    effective: float
    collision: float
    cosine: float
    width: int


@torch.no_grad()
def key_health(z: Tensor) -> KeyHealth:
    """Measures keys z [n, h]. If there are more than 1,024 tokens, it uses 1,024 evenly spaced ones."""
    z = z[:: -(-len(z) // _AT_MOST)].float()
    gram = z @ z.T
    directions = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp(min=1e-30)
    cosines = directions @ directions.T
    pairs = max(1, len(z) * (len(z) - 1))
    return KeyHealth(
        participation(gram),
        float(((cosines.square().sum() - cosines.diagonal().square().sum()) / pairs).clamp(min=0).sqrt()),
        float((cosines.sum() - cosines.diagonal().sum()) / pairs),
        z.shape[1],
    )


def participation(gram: Tensor) -> float:
    """Returns (Σλ)² / Σλ² of a symmetric matrix, or 0 for a zero matrix.

    This participation ratio is the number of directions that carry the matrix's weight.
    """
    trace = gram.trace()
    # division by the trace first avoids overflow and underflow of the squares
    return 1 / float((gram / trace).square().sum()) if trace > 0 else 0.0


@contextmanager
def keys_of_all_layers(model: nn.Module, rows: Tensor | None, found: dict[int, KeyHealth]) -> Iterator[None]:
    """Records the keys' health of every decoder layer in `found` during a forward pass.

    Keys of a TTT layer with whitening are measured after whitening.

    Args:
        model: the converted model.
        rows: bool [B, T], the tokens to measure; None for all.
        found: receives the measurements by layer index.
    """

    def hook_of(index: int) -> object:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            z = args[0].detach()
            if isinstance(module, FastWeight):
                z = module.keys(z)
            found[index] = key_health(z.flatten(0, -2) if rows is None else z.reshape(*rows.shape, -1)[rows])

        return hook

    own = fast_weights(model)  # LoRA may wrap the TTT layers
    layers = {i: own.get(i, parts.down_proj) for i, parts in locate(causal_lm(model)).layers.items()}
    handles = [down.register_forward_pre_hook(hook_of(i)) for i, down in layers.items()]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""What reaches the TTT layers of a converted model in a forward, for those who measure it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..families import locate
from ..surgery import config_of, fast_weights


@dataclass(frozen=True)
class Seen:
    """Of one layer and forward: the down-projection's input [B, T, h], the target's source [B, T, d], what enters the block [B, T, d]."""

    z: Tensor
    source: Tensor
    stream: Tensor


@contextmanager
def seeing(model: Any) -> Iterator[dict[int, Seen]]:
    """Within it every forward leaves here, by layer index, what its TTT layers saw."""
    decoder, from_embeddings = locate(model), config_of(model).target == "embeddings"
    handles: list[RemovableHandle] = []
    found: dict[int, Seen] = {}

    def keeping(module: nn.Module) -> list[Tensor]:
        """The first argument of a module's last call."""
        place: list[Tensor] = []
        handles.append(module.register_forward_pre_hook(functools.partial(_keep, place), with_kwargs=True))
        return place

    def noting(index: int, source: list[Tensor], stream: list[Tensor]) -> Any:
        def note(down: nn.Module, args: tuple[Tensor]) -> None:
            rows = stream[0].shape[:2]
            found[index] = Seen(args[0].detach().view(*rows, -1), source[0].detach().view(*rows, -1), stream[0].detach())

        return note

    embeddings = keeping(decoder.blocks[0])
    for index, layer in fast_weights(model).items():
        parts = decoder.layers[index]
        source = embeddings if from_embeddings else keeping(parts.mlp)
        handles.append(layer.register_forward_pre_hook(noting(index, source, keeping(parts.block))))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _keep(place: list[Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A pre-hook that keeps a module's first argument."""
    place[:] = [args[0] if args else kwargs["hidden_states"]]

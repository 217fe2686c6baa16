"""Records the activations and gradients at the TTT layers of a converted model in a forward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..families import locate
from ..layer.overrides import overriding
from ..surgery import config_of, fast_weights


@dataclass(frozen=True)
class Seen:
    """Activations of one layer in a forward pass.

    Attributes:
        z: input of the down-projection [B, T, h].
        source: the target's source [B, T, d].
        stream: input of the decoder block [B, T, d], the residual stream.
    """

    z: Tensor
    source: Tensor
    stream: Tensor


@contextmanager
def seeing(model: Any) -> Iterator[dict[int, Seen]]:
    """Yields a dict in which every forward pass stores the activations of the TTT layers, by index."""
    decoder, from_embeddings = locate(model), config_of(model).target == "embeddings"
    hooks = ExitStack()
    found: dict[int, Seen] = {}

    def keeping(module: nn.Module) -> list[Tensor]:
        """Returns a list that holds the first argument of a module's last call."""
        place: list[Tensor] = []
        hooks.enter_context(
            module.register_forward_pre_hook(functools.partial(_keep, place), with_kwargs=True)
        )
        return place

    def noting(index: int, source: list[Tensor], stream: list[Tensor]) -> Any:
        def note(down: nn.Module, args: tuple[Tensor]) -> None:
            rows = stream[0].shape[:2]
            found[index] = Seen(
                args[0].detach().view(*rows, -1), source[0].detach().view(*rows, -1), stream[0].detach()
            )

        return note

    with hooks:
        embeddings = keeping(decoder.blocks[0])
        for index, layer in fast_weights(model).items():
            parts = decoder.layers[index]
            source = embeddings if from_embeddings else keeping(parts.mlp)
            hooks.enter_context(layer.register_forward_pre_hook(noting(index, source, keeping(parts.block))))
        yield found


@contextmanager
def probing(model: Any) -> Iterator[dict[int, Tensor]]:
    """Yields a dict of probes, by layer index.

    A probe is a tensor of zeros that each forward pass adds to the TTT layer's output. Its gradient is the
    gradient at that output. Parameters require no gradient inside the block.
    """
    probes: dict[int, Tensor] = {}

    def adding(index: int) -> Any:
        def add(down: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
            probes[index] = torch.zeros_like(out, requires_grad=True)
            return out + probes[index]

        return add

    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as hooks, overriding(asking, requires_grad=False), torch.enable_grad():
        for index, layer in fast_weights(model).items():
            hooks.enter_context(layer.register_forward_hook(adding(index)))
        yield probes


@contextmanager
def feeling(model: Any) -> Iterator[dict[int, Tensor]]:
    """Yields a dict in which every forward pass stores the sensitivity of each TTT layer's block, by index.

    The sensitivity is the change of the block's output per change of the down-projection's output. It is a
    scalar, the median over tokens of ‖uᵀ ∂block / ∂down‖ / ‖u‖ for random signs u. It is 1 if the
    down-projection's output is added to the residual stream unchanged. If that output is multiplied first,
    the sensitivity is the multiplier. If a norm follows it, as in Gemma 3, the sensitivity is some hundreds
    or more.
    """
    blocks, generator = locate(model).layers, torch.Generator().manual_seed(0)
    found: dict[int, Tensor] = {}

    def taking(index: int, probes: dict[int, Tensor]) -> Any:
        def take(block: nn.Module, args: Any, out: Any) -> Any:
            leaves = out[0] if isinstance(out, tuple) else out
            signs = torch.randint(2, leaves.shape, generator=generator).to(leaves) * 2 - 1
            (felt,) = torch.autograd.grad(leaves, probes[index], signs)
            found[index] = felt.float().norm(dim=-1).median() / math.sqrt(felt.shape[-1])
            # detached, since no later gradient needs the graph
            return (leaves.detach(), *out[1:]) if isinstance(out, tuple) else leaves.detach()

        return take

    with probing(model) as probes, ExitStack() as hooks:
        for index in fast_weights(model):
            hooks.enter_context(blocks[index].block.register_forward_hook(taking(index, probes)))
        yield found


def _keep(place: list[Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Stores a module's first argument. It is a forward pre-hook."""
    place[:] = [args[0] if args else kwargs["hidden_states"]]

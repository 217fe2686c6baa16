"""Faults of a conversion: how conv and P start, what happens to W0 and its bias, what layers are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inplace_ttt.config import InPlaceTTTConfig
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.surgery import fast_weights

from . import conditions as only
from .conditions import When
from .fault import Kind, owned
from .under_way import Patch, now, places_of_call
from .world import Spoil

Plant = Callable[[Patch], None]


def started(change: Callable[[TargetGenerator, float, int, float], None]) -> Callable[[float, When], Plant]:
    """What conv and P start as is changed; change: generator, σ, seed and size."""

    def of(size: float, when: When) -> Plant:
        def plant(patch: Patch) -> None:
            @torch.no_grad()
            def reset(self: TargetGenerator, std: float, seed: int) -> None:
                real(self, std, seed)
                change(self, std, seed, size)

            real = TargetGenerator.reset_parameters
            patch.setattr(TargetGenerator, "reset_parameters", reset)

        return plant

    return of


def identity_tap(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    target.conv[:, 0, target.conv.shape[-1] // 2] = size


def small_noise(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    target.conv.normal_(0, size * std, generator=torch.Generator().manual_seed(seed))


def scaled(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    target.proj.mul_(size)


def band(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    """Beside its diagonal P has another."""
    target.proj.diagonal(1).copy_(size * target.proj.diagonal()[1:])


def later_alike(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    """All TTT layers but the first draw from one seed."""
    generator = torch.Generator().manual_seed(min(seed, 1))
    target.proj.diagonal().copy_(torch.randn(len(target.proj), generator=generator) * std)


def bias_lost(size: float, when: When) -> Plant:
    """A down-projection's bias is left out, a share of it."""

    def plant(patch: Patch) -> None:
        def read(self: FastWeight, *args: Any) -> Tensor:
            out, bias, call = real(self, *args), getattr(self, "bias", None), now()
            if bias is None or call is None:
                return out
            at = torch.zeros(call.batch, call.tokens, 1, dtype=out.dtype)
            for piece in places_of_call(call):
                at[piece.index, piece.start : piece.stop] = float(when.holds(piece.place))
            return out - size * at * bias

        real = FastWeight._read_whole
        patch.setattr(FastWeight, "_read_whole", read)

    return plant


def eta_of_another_layer(size: float, when: When) -> Plant:
    """Each layer has the η that belongs to the one before it."""

    def plant(patch: Patch) -> None:
        real = InPlaceTTTConfig.eta_of
        patch.setattr(InPlaceTTTConfig, "eta_of", lambda self, position: real(self, position - 1))

    return plant


def one_generator(size: float, when: When) -> Spoil:
    """Later layers write with the first one's generator, or with its conv alone."""

    def spoil(model: PreTrainedModel) -> None:
        first, *others = fast_weights(model).values()
        for layer in others:
            if size < 1:
                layer.ttt.conv = first.ttt.conv
            else:
                layer.ttt = first.ttt

    return spoil


START = ("start",)
BIASED = tuple(when for when in only.ANYWHERE if when not in (only.LAST_LAYER, only.AFTER_LOADING))
KINDS: tuple[Kind, ...] = (
    Kind("conv starts with a tap on the token itself", "start", owned("start-conv start-identity"), started(identity_tap), (1.0, 0.01),
         count=2, scenes=START),
    Kind("conv starts with small noise", "start", owned("start-conv"), started(small_noise), (0.1, 0.01), count=2, scenes=START),
    Kind("P starts with another size", "start", owned("start-projection"), started(scaled), (3.0, 1.6, 0.5, 0.0), count=3, scenes=START),
    Kind("P starts with a second diagonal", "start", owned("start-projection"), started(band), (1.0, 0.1), count=2, scenes=START),
    Kind("P starts alike in all layers but the first", "start", owned("start-projection every-layer"), started(later_alike),
         scenes=START, world={"ttt_layers": 3}),
    Kind("the bias is lost", "start", owned("start-identity fast-tensor"), bias_lost, (1.0, 0.3), BIASED, 5,
         world={"family": "gpt2"}),
    Kind("layers have each other's η", "start", owned("eta every-layer every-layer loss-sum"), eta_of_another_layer, scenes=("whole",),
         world={"settings": {"eta": (0.5, 2.0)}}),
    Kind("layers share the first one's generator", "start", owned("every-layer start-projection"), spoil=one_generator,
         sizes=(1.0, 0.5), count=2),
)  # fmt: skip

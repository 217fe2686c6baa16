"""Faults of the gradient: what a forward computes is right, and what it teaches is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import chunk_conv

from . import conditions as only
from .fault import Kind, owned
from .planting import Target, with_inputs, with_target
from .rule import Rule, Step, with_rule

Inputs = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]
TEACHING = (
    only.WITH_GRADIENT, only.IN_TRAINING, only.LATER_LAYER_TRAINING, only.LAST_LAYER, only.SIX_CHUNKS, only.ODD_LENGTH, only.LARGE_CHUNKS,
    only.UNEVEN, only.LATER_ROWS,
)  # fmt: skip
TRAINING = ("training", "long training", "training batch", "training, chunks of 16")


class _Taught(torch.autograd.Function):
    """x, with a gradient that is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def taught(x: Tensor, factor: float | Tensor) -> Tensor:
    taught: Tensor = _Taught.apply(x, factor)
    return taught


def of_targets(size: float) -> Inputs:
    return lambda z, v, weight: (z, taught(v, 1 - size), weight)


def of_w0(size: float) -> Inputs:
    return lambda z, v, weight: (z, v, None if weight is None else taught(weight, 1 - size))


def truncated(chunks: float) -> Rule:
    """What a chunk reads teaches only the newest so many writes."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        kept = at.memory.setdefault("taught", [])
        kept.append(delta)
        if len(kept) <= chunks:
            return state + delta
        kept.pop(0)
        return (state + delta).detach() + sum(d - d.detach() for d in kept)

    return Rule(write=write)


def of_conv(size: float) -> Target:
    """Conv learns less from outer taps."""

    def target(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        factor = torch.ones_like(self.conv)
        factor[..., 0] = factor[..., -1] = 1 - size
        return chunk_conv(x, taught(self.conv, factor), layout, self.first_tap) @ self.proj

    return target


def of_later_rows(size: float) -> Inputs:
    def change(z: Tensor, v: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        factor = torch.ones(len(v), 1, 1, dtype=v.dtype)
        factor[1:] = 1 - size
        return z, taught(v, factor), weight

    return change


SIZES = (1.0, 0.5, 0.1)
KINDS: tuple[Kind, ...] = (
    Kind("targets learn less", "training", owned("gradient in-training target-gradient"), with_inputs(of_targets), SIZES, TEACHING, 4,
         TRAINING),
    Kind("targets learn more", "training", owned("gradient in-training"), with_inputs(lambda s: of_targets(-s)), (1.0, 0.3), TEACHING, 3,
         TRAINING),
    Kind("W0 learns less", "training", owned("gradient in-training"), with_inputs(of_w0), SIZES, TEACHING, 3, TRAINING),
    Kind("only the newest writes learn", "training", owned("gradient in-training over-many-chunks"), with_rule(truncated), (1, 2, 5),
         (only.WITH_GRADIENT, only.LATER_LAYER_TRAINING, only.LAST_LAYER), 3, TRAINING),
    Kind("conv's outer taps learn less", "training", owned("gradient in-training"), with_target(of_conv), SIZES, TEACHING, 3, TRAINING),
    Kind("rows after the first learn less", "training", owned("gradient in-training in-batches"), with_inputs(of_later_rows), SIZES,
         (only.IN_A_BATCH, only.LATER_LAYER_TRAINING, only.UNEVEN), 3, ("training batch",)),
)  # fmt: skip

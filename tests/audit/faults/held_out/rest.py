"""Faults of the start, the clip, the gradient and the extensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt import KeyWhitening, surgery
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import chunk_conv
from inplace_ttt.rules import RidgeRule

from .. import conditions as only
from ..clips import INFERENCE, TIGHT, other_tau
from ..conditions import When
from ..extensions import RAW, RIDGE
from ..fault import Kind, owned
from ..gradients import SIZES, TEACHING, TRAINING, taught
from ..planting import Target, with_source, with_target
from ..rule import Rule, with_rule
from ..start import started
from ..under_way import Patch, now, places_of_call

Plant = Callable[[Patch], None]


def uniform(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    drawn = torch.rand(len(target.proj), generator=torch.Generator().manual_seed(seed))
    target.proj.diagonal().copy_((2 * drawn - 1) * 3**0.5 * std)


def absolute(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    target.proj.diagonal().copy_(target.proj.diagonal().abs())


def signs(target: TargetGenerator, std: float, seed: int, size: float) -> None:
    target.proj.diagonal().copy_(target.proj.diagonal().sign() * std)


def w0_rescaled(size: float, when: When) -> Plant:
    """The conversion changes the sizes of W0's rows; under the condition on layers, of those after the
    first."""

    def plant(patch: Patch) -> None:
        def install(parts: Any, settings: Any, *args: Any, **kwargs: Any) -> None:
            real(parts, settings, *args, **kwargs)
            if when is only.ALWAYS or settings.layer != settings.config.layers[0]:
                weight = parts.down_proj.weight
                weight.data = (
                    weight.data * (1 + size * torch.linspace(-1, 1, len(weight), dtype=weight.dtype))[:, None]
                )

        real = surgery.install
        patch.setattr(surgery, "install", install)

    return plant


def unscaled(size: float) -> Callable[[FastWeight, Tensor], Tensor]:
    """The embeddings as the table has them, without the family's factor."""
    return lambda layer, x: x / x.shape[-1] ** 0.5


def by_rows(delta: Tensor, tau: Any) -> Tensor:
    """The largest row's norm is bounded."""
    return _bounded(delta, tau, torch.linalg.vector_norm(delta, dim=-1).max())


def spectral(delta: Tensor, tau: Any) -> Tensor:
    return _bounded(delta, tau, torch.linalg.matrix_norm(delta, 2))


def squared(delta: Tensor, tau: Any) -> Tensor:
    return _bounded(delta, tau, delta.square().sum())


def _bounded(delta: Tensor, tau: Any, norm: Tensor) -> Tensor:
    return delta.new_ones(()) if tau is None else (tau / norm.detach().clamp(min=1e-30)).clamp(max=1)


def writes_teach_less(size: float) -> Rule:
    return Rule(delta=lambda at: at.values.T @ taught(at.keys, 1 - size))  # type: ignore[union-attr]


def reads_teach_less(size: float) -> Rule:
    return Rule(key=lambda at: taught(at.keys, 1 - size))


def p_learns_less(size: float) -> Target:
    def target(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        return chunk_conv(x, self.conv, layout, self.first_tap) @ taught(self.proj, 1 - size)

    return target


def other_damping(size: float, when: When) -> Plant:
    """λ times a factor in a call where the condition holds anywhere."""

    def plant(patch: Patch) -> None:
        def settings(self: FastWeight) -> dict[str, Any]:
            right, call = real(self), now()
            acts = call is not None and any(when.holds(piece.place) for piece in places_of_call(call))
            acts &= isinstance(rule := right["rule"], RidgeRule)
            return {**right, "rule": dataclasses.replace(rule, ridge=rule.ridge * size)} if acts else right

        real = FastWeight._settings
        patch.setattr(FastWeight, "_settings", settings)

    return plant


def mean_kept(size: float) -> Target:
    """The source's mean is not taken out, by a share."""

    def target(self: TargetGenerator, x: Tensor, layout: ChunkLayout, right: Tensor) -> Tensor:
        assert self.mean is not None and self.gain is not None
        return (
            chunk_conv((x + size * self.mean * self.gain).to(x.dtype), self.conv, layout, self.first_tap)
            @ self.proj
        )

    return target


def gain_off(size: float) -> Target:
    return lambda self, x, layout, right: (1 + size) * right


CENTERED = {"settings": {"normalize_targets": True, "whitening": KeyWhitening(rank=0.75), "eta": 10.0}}
WRITES = (*only.ANYWHERE, *only.STREAMED)
LAW = tuple(
    when for when in only.ANYWHERE if when not in (only.IN_FLOAT32, only.AFTER_LOADING, only.LAST_LAYER)
)
START = ("start",)
KINDS: tuple[Kind, ...] = (
    Kind("P starts uniform", "start", owned("start-projection"), started(uniform), scenes=START),
    Kind("P starts without a sign", "start", owned("start-projection"), started(absolute), scenes=START),
    Kind("P starts as signs", "start", owned("start-projection"), started(signs), scenes=START),
    Kind("a conversion rescales W0", "start", owned("start-identity"), w0_rescaled, (0.3, 0.05), (only.ALWAYS, only.LATER_LAYER), 3,
         ("whole",)),
    Kind("the source is unscaled", "target", owned("target-source loss-sum eta"), with_source(unscaled), whens=(only.ALWAYS, *WRITES),
         count=3, world={"family": "gemma3"}),
    Kind("the clip is ignored", "clip", owned("clip-inference"), other_tau(lambda layer, bound, size: None),
         whens=(*INFERENCE, only.WITH_CACHE, only.DECODING, only.LATER_CALLS), count=3, world=TIGHT),
    Kind("the clip bounds the largest row", "clip", owned("clip-inference clip-scope"), with_rule(lambda s: Rule(factor=by_rows)),
         whens=(only.ALWAYS, *INFERENCE), count=3, world=TIGHT),
    Kind("the clip bounds the spectral norm", "clip", owned("clip-inference clip-scope"), with_rule(lambda s: Rule(factor=spectral)),
         whens=(only.ALWAYS, *INFERENCE), count=2, world=TIGHT),
    Kind("the clip bounds the square", "clip", owned("clip-inference clip-scope"), with_rule(lambda s: Rule(factor=squared)),
         whens=(only.ALWAYS, *INFERENCE), count=2, world=TIGHT),
    Kind("keys learn less from writes", "training", owned("gradient in-training"), with_rule(writes_teach_less), SIZES, TEACHING, 3,
         TRAINING),
    Kind("keys learn less from reads", "training", owned("gradient in-training"), with_rule(reads_teach_less), SIZES, TEACHING, 3,
         TRAINING),
    Kind("P learns less", "training", owned("gradient in-training"), with_target(p_learns_less), SIZES, TEACHING, 3, TRAINING),
    Kind("λ is another", "extension", owned("least-squares"), other_damping, (100.0, 30.0), LAW, 4, world=RAW),
    Kind("the source's mean is not taken out", "extension", owned("target-source conv-bias"), with_target(mean_kept), (1.0, 0.3), WRITES, 3,
         world=CENTERED),
    Kind("the source's gain is off", "extension", owned("target-source loss-sum eta"), with_target(gain_off), (1.0, 0.3, 0.1), WRITES, 3,
         world=RIDGE),
)  # fmt: skip

"""Faults of the rule itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.stream import FastWeightStream

from .. import conditions as only
from ..conditions import When
from ..fault import Kind, owned
from ..rule import Rule, Step, with_rule
from ..under_way import Patch, now

SIZES = (1.0, 0.3, 0.1)
WRITES = (*only.ANYWHERE, *only.STREAMED)


def later_delta(size: float) -> Rule:
    return Rule(read=lambda at, state: state if at.next is None else state + size * at.next)


def decay(size: float) -> Rule:
    return Rule(write=lambda at, state, delta: (1 - size) * state + delta)


def late(size: float) -> Rule:
    """The newest write is read with less than its weight, and in full from the next one on."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        owed = at.memory.get("owed", torch.zeros_like(delta))
        at.memory["owed"] = size * delta
        return state + owed + (1 - size) * delta

    return Rule(write=write)


def centered(size: float) -> Rule:
    def delta(at: Step) -> Tensor:
        assert at.values is not None
        return at.values.T @ (at.keys - size * at.keys.mean(0))

    return Rule(delta=delta)


def averaged(size: float) -> Rule:
    """What is read is divided by the number of writes, or by a power of it."""
    return Rule(read=lambda at, state: state / max(at.place.chunk, 1) ** size)


def sparse(threshold: float) -> Rule:
    """Entries of the state below a part of its largest are dropped."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        total = state + delta
        return total * (total.detach().abs() >= threshold * total.detach().abs().max())

    return Rule(write=write)


def leaking(size: float) -> Rule:
    return Rule(start=lambda at, before: size * before)


def gated(size: float) -> Rule:
    """Once something is written, W0 counts for less."""
    return Rule(base=lambda at: 1 - size * (at.place.chunk > 0))


def capped(times: float) -> Rule:
    """The state's norm stays below a multiple of the first write's."""

    def write(at: Step, state: Tensor, delta: Tensor) -> Tensor:
        first = at.memory["first"] = at.memory.get("first") or float(delta.detach().norm())
        total = state + delta
        return total * (times * first / total.detach().norm().clamp(min=1e-30)).clamp(max=1)

    return Rule(write=write)


def stale_w0(size: float, when: When) -> Callable[[Patch], None]:
    """Where the condition holds for a call, W0 is what it was when the layer was first called."""

    def plant(patch: Patch) -> None:
        def back(layer: FastWeight, z: Tensor, out: Tensor) -> Tensor:
            call, w0 = now(), layer.base_weight()
            assert call is not None
            first = layer.__dict__.setdefault("first_w0", w0.detach().clone()).to(w0)
            at = when.tokens_of(call)[..., None]
            return out + at * size * torch.nn.functional.linear(z, first - w0)

        def read_whole(self: FastWeight, z: Tensor, *args: Any) -> Tensor:
            return back(self, z, real_whole(self, z, *args))

        def advance(
            self: FastWeightStream, out: Tensor, z: Tensor, x: Tensor, spans: Any, layer: Any, **rest: Any
        ) -> Tensor:
            return real_advance(self, back(layer, z, out), z, x, spans, layer, **rest)

        real_whole, real_advance = FastWeight._read_whole, FastWeightStream.advance
        patch.setattr(FastWeight, "_read_whole", read_whole)
        patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))

    return plant


OWN = tuple(when for when in only.ANYWHERE if when is not only.ODD_LENGTH)
CAUSAL = tuple(when for when in OWN if when not in (only.IN_EVALUATION, only.IN_FLOAT32))
SUM, NORM = "plain-sum", "no-normalization"

KINDS: tuple[Kind, ...] = (
    Kind("the next chunk's delta is read", "op", owned("causality"), with_rule(later_delta), SIZES, CAUSAL, 4),
    Kind("the state fades", "op", owned(SUM), with_rule(decay), (0.5, 0.3, 0.1), WRITES, 5),
    Kind("the state fades", "op", owned(SUM), with_rule(decay), (1.0, 0.7), only.COARSE, 3),
    Kind("the newest write comes late", "op", owned(f"{SUM} writes"), with_rule(late), SIZES, WRITES, 3),
    Kind("keys are centered in their chunk", "op", owned(f"{NORM} keys"), with_rule(centered), (1.0, 0.5), WRITES, 3),
    Kind("the mean of writes is read", "op", owned(SUM), with_rule(averaged), (1.0, 0.5), WRITES, 3),
    Kind("small entries of the state are dropped", "op", owned(f"{SUM} state-precision {NORM}"), with_rule(sparse), (0.3, 0.2, 0.1),
         (only.ALWAYS, *WRITES), 3),
    Kind("documents leak into the next", "op", owned("document-reset"), with_rule(leaking), SIZES,
         (only.ALWAYS, only.IN_TRAINING, only.LATER_LAYER, only.LATE_DOCUMENTS, only.PACKED_IN_A_BATCH, only.LATER_ROWS), 4,
         ("packed", "packed training")),
    Kind("W0 counts for less once something is written", "op", owned(f"{SUM} fast-tensor"), with_rule(gated), (0.5, 0.1, 0.05), WRITES, 3),
    Kind("the state's norm is bounded", "op", owned(f"{SUM} clip-scope over-many-chunks"), with_rule(capped), (1.2, 2.0),
         (only.ALWAYS, only.IN_TRAINING, only.WITH_CACHE, only.LAST_LAYER, only.IN_A_BATCH), 3,
         ("long", "long stream", "long training", "batch")),
    Kind("W0 is that of the first call", "op", owned("fast-tensor reset-keeps-training"), stale_w0, (1.0, 0.3),
         (only.ALWAYS, only.LATER_LAYER, only.LAST_LAYER, only.WITH_CACHE), 3, ("trained",)),
)  # fmt: skip

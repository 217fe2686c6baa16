"""Faults of single ways of calling, of large sizes, and of half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import inplace_ttt.layer.buffers
import inplace_ttt.ops.precision
import inplace_ttt.session.session
from inplace_ttt.config import InPlaceTTTConfig
from inplace_ttt.layer.cache import only_written
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.forward_context import ForwardContext
from inplace_ttt.layer.hooks import LayerCall, ModelHooks
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.session.session import Session
from inplace_ttt.surgery import fast_weights

from . import conditions as only
from .conditions import When
from .fault import Kind, owned
from .op import inclusive, rounded, rounded_keys, wrong_eta
from .rule import with_rule
from .under_way import Patch
from .world import Spoil

Plant = Callable[[Patch], None]
WAY = "ways-of-calling"


def forgotten_with_attention(size: float, when: When) -> Plant:
    """Where the KV cache is dropped, what was written goes with it."""

    def plant(patch: Patch) -> None:
        def emptied(cache: Any, empty: Any) -> Any:
            only_written(cache, empty).reset()
            return empty

        patch.setattr(inplace_ttt.session.session, "only_written", emptied)

    return plant


def second_select_lost(size: float, when: When) -> Plant:
    """Rows of a stream move once, and stay where they are after that."""

    def plant(patch: Patch) -> None:
        def select(self: FastWeightStream, rows: list[int]) -> None:
            again = "moved" in self.__dict__ and len(rows) == self.batch
            self.__dict__["moved"] = True
            if not again:
                real(self, rows)

        real = FastWeightStream.select
        patch.setattr(FastWeightStream, "select", select)

    return plant


def changed_by_generation(size: float, when: When) -> Plant:
    """When a session has generated, its open chunk starts anew."""

    def plant(patch: Patch) -> None:
        def generate(self: Session, *args: Any, **kwargs: Any) -> Tensor:
            out = real(self, *args, **kwargs)
            for layer in self.cache.layers:
                for row in getattr(layer, "fast_weight", FastWeightStream(0, 1)).rows:
                    row.filled = 0
            return out

        real = Session.generate
        patch.setattr(Session, "generate", generate)

    return plant


def text_taken_for_generated(size: float, when: When) -> Plant:
    """A token alone counts as generated, also where a session reads it."""
    return lambda patch: patch.setattr(ForwardContext, "generated", property(lambda self: self.shape[1] == 1))


def on_with_a_cache(size: float, when: When) -> Plant:
    """TTT stays on with a cache, also where it is switched off."""

    def plant(patch: Patch) -> None:
        def init(self: ForwardContext, given: Any, **kwargs: Any) -> None:
            real(self, given, **kwargs)
            self.enabled = self.enabled or self.past > 0

        real = ForwardContext.__init__
        patch.setattr(ForwardContext, "__init__", init)

    return plant


def shared_by_copies(size: float, when: When) -> Plant:
    """A copy of a model has its target generators in common with it."""
    return lambda patch: patch.setattr(
        TargetGenerator, "__deepcopy__", lambda self, memo: self, raising=False
    )


def etas_reversed(size: float, when: When) -> Plant:
    """A list of η is saved in the other order."""

    def plant(patch: Patch) -> None:
        def to_dict(self: InPlaceTTTConfig) -> dict[str, Any]:
            values = real(self)
            return {**values, "eta": values["eta"][::-1]} if isinstance(values["eta"], list) else values

        real = InPlaceTTTConfig.to_dict
        patch.setattr(InPlaceTTTConfig, "to_dict", to_dict)

    return plant


def later_sources_detached(size: float, when: When) -> Plant:
    """The target's source has no gradient in TTT layers after the first."""

    def plant(patch: Patch) -> None:
        def source(self: FastWeight, call: LayerCall) -> Tensor:
            x = real(self, call)
            return x.detach() if self.fast.layer > 0 else x

        real = FastWeight._source
        patch.setattr(FastWeight, "_source", source)

    return plant


def w0_frozen(size: float, when: When) -> Spoil:
    def spoil(model: PreTrainedModel) -> None:
        for layer in fast_weights(model).values():
            layer.get_parameter("weight").requires_grad_(False)

    return spoil


def w0_rounded(bits: float, when: When) -> Plant:
    """A conversion rounds W0."""

    def plant(patch: Patch) -> None:
        def attach(self: ModelHooks, base: Any, *args: Any) -> None:
            for module in base.modules():
                if isinstance(module, FastWeight):
                    module.get_parameter("weight").data = rounded(module.get_parameter("weight").data, bits)
            real(self, base, *args)

        real = ModelHooks.attach
        patch.setattr(ModelHooks, "attach", attach)

    return plant


def no_range_factor(size: float, when: When) -> Plant:
    """States are read in float16 as they are."""

    def plant(patch: Patch) -> None:
        for module in (inplace_ttt.ops.precision, inplace_ttt.layer.buffers):
            patch.setattr(module, "in_range", lambda matrix, dtype: (matrix.to(dtype), None))

    return plant


CONTEXTS = (only.IN_INFERENCE_MODE, only.UNDER_AUTOCAST, only.GRADIENT_IN_EVALUATION)
KINDS: tuple[Kind, ...] = (
    Kind("η is smaller at some size", "size", owned("drawn-sizes over-many-chunks"), with_rule(wrong_eta), (0.5,), only.SIZES, 4),
    Kind("an inclusive sum at some size", "size", owned("drawn-sizes"), with_rule(inclusive), (0.5,), only.SIZES, 2),
    Kind("η is smaller in a context", "way of calling", owned(WAY), with_rule(wrong_eta), (0.5,), CONTEXTS, 3),
    Kind("writes go with the KV cache", "way of calling", owned(WAY), forgotten_with_attention, scenes=("KV cache dropped",)),
    Kind("rows move once", "way of calling", owned(WAY), second_select_lost, scenes=("chosen rows",)),
    Kind("a session's open chunk is lost by generating", "way of calling", owned(WAY), changed_by_generation, scenes=("after generation",)),
    Kind("a session's single token is not written", "way of calling", owned(WAY), text_taken_for_generated,
         scenes=("single tokens of text",)),
    Kind("TTT cannot be switched off with a cache", "way of calling", owned(WAY), on_with_a_cache, scenes=("off for a while",)),
    Kind("copies of a model share P", "way of calling", owned(WAY), shared_by_copies, scenes=("copied model",)),
    Kind("a list of η is saved reversed", "save/load", owned("through-a-file"), etas_reversed, scenes=("checkpoint",),
         world={"settings": {"eta": (0.5, 2.0)}}),
    Kind("later layers' sources are detached", "training", owned("gradient target-gradient"), later_sources_detached, scenes=("training",)),
    Kind("W0 is frozen", "training", owned("start-identity gradient"), spoil=w0_frozen, scenes=("training",)),
    Kind("a conversion rounds W0", "start", owned("start-identity"), w0_rounded, (8, 7), count=2, scenes=("start",)),
    Kind("η is a few percent off", "half precision", owned("precisions eta loss-sum"), with_rule(wrong_eta), (0.02, 0.01),
         (only.IN_BFLOAT16,), 2, ("strength",)),
    Kind("keys of few bits are written in bfloat16", "half precision", owned("precisions keys"), with_rule(rounded_keys), (4, 5),
         (only.IN_BFLOAT16,), 2, ("half precision",)),
    Kind("no factor keeps states in float16's range", "half precision", owned("precisions"), no_range_factor, scenes=("tiny writes",),
         world={"dtype": torch.float16}),
)  # fmt: skip

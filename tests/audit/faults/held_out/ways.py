"""Held out: faults of single ways of calling, of large sizes, and of half precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import inplace_ttt.documents
from inplace_ttt.config import InPlaceTTTConfig
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.forward_context import ForwardContext
from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.session.session import Session

from .. import conditions as only
from ..conditions import When
from ..fault import Kind, owned
from ..op import minus, rounded_state
from ..rule import with_rule
from ..under_way import Patch

Plant = Callable[[Patch], None]
WAY = "ways-of-calling"


def off_by_embeddings(size: float, when: When) -> Plant:
    """TTT is off where embeddings are given in the place of ids."""

    def plant(patch: Patch) -> None:
        def init(self: ForwardContext, given: Any, **kwargs: Any) -> None:
            real(self, given, **kwargs)
            self.enabled = self.enabled and given.get("inputs_embeds") is None

        real = ForwardContext.__init__
        patch.setattr(ForwardContext, "__init__", init)

    return plant


def lengths_ignored(size: float, when: When) -> Plant:
    """cu_seq_lens are taken for one document."""

    def plant(patch: Patch) -> None:
        def packed(self: ForwardContext, ends: Tensor, positions: Any, chunk_size: int) -> ChunkLayout:
            return ChunkLayout.from_lengths([[int(ends[-1])]], chunk_size)

        patch.setattr(ForwardContext, "_packed_by_cu_seqlens", packed)

    return plant


def documents_begin_at_zero(size: float, when: When) -> Plant:
    """A document is taken to begin where a position is 0."""

    def plant(patch: Patch) -> None:
        def starts(positions: Tensor) -> Tensor:
            found = positions == 0
            found[:, 0] = True
            return found

        patch.setattr(inplace_ttt.documents, "document_starts", starts)

    return plant


def recomputation_detached(size: float, when: When) -> Plant:
    """A forward that is recomputed for its gradients has smaller keys."""

    def plant(patch: Patch) -> None:
        def read(self: FastWeight, z: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
            again = torch.is_grad_enabled() and context is not self.hooks.model.current
            return real(self, z * (1 - size) if again else z, x, context)

        real = FastWeight._read_whole
        patch.setattr(FastWeight, "_read_whole", read)

    return plant


def state_shared_by_copies(size: float, when: When) -> Plant:
    """Copies of a cache have the fast weight in common."""
    return lambda patch: patch.setattr(
        FastWeightStream, "__deepcopy__", lambda self, memo: self, raising=False
    )


def forgotten_between_reads(size: float, when: When) -> Plant:
    """What a session reads at once begins with an empty open chunk."""

    def plant(patch: Patch) -> None:
        def advance(self: FastWeightStream, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if out.shape[1] > 40 and any(self.tokens) and sum(self.tokens) >= 1024:
                self.rows = [dataclasses.replace(row, filled=0) for row in self.rows]
            return real(self, out, *args, **kwargs)

        real = FastWeightStream.advance
        patch.setattr(FastWeightStream, "advance", torch.no_grad()(advance))

    return plant


def written_after_generation(size: float, when: When) -> Plant:
    """At the end of a session's generation its last chunk is written a second time."""

    def plant(patch: Patch) -> None:
        def generate(self: Session, *args: Any, **kwargs: Any) -> Tensor:
            out = real(self, *args, **kwargs)
            for layer in self.cache.layers:
                stream = getattr(layer, "fast_weight", None)
                if stream is not None and stream.state is not None:
                    stream.state.mul_(1 + size)
            return out

        real = Session.generate
        patch.setattr(Session, "generate", generate)

    return plant


def first_eta_for_all(size: float, when: When) -> Plant:
    """Of a list of η the first is saved for all layers."""

    def plant(patch: Patch) -> None:
        def to_dict(self: InPlaceTTTConfig) -> dict[str, Any]:
            values = real(self)
            return {**values, "eta": values["eta"][0]} if isinstance(values["eta"], list) else values

        real = InPlaceTTTConfig.to_dict
        patch.setattr(InPlaceTTTConfig, "to_dict", to_dict)

    return plant


def born_frozen(size: float, when: When) -> Plant:
    """conv and P are made as parameters that no training changes."""

    def plant(patch: Patch) -> None:
        def init(self: TargetGenerator, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            self.requires_grad_(False)

        real = TargetGenerator.__init__
        patch.setattr(TargetGenerator, "__init__", init)

    return plant


KINDS: tuple[Kind, ...] = (
    Kind("a minus sign at some size", "size", owned("drawn-sizes"), with_rule(minus), (1.0,), only.SIZES, 3),
    Kind("what a session reads at once begins a chunk", "size", owned("drawn-sizes"), forgotten_between_reads, scenes=("long session",)),
    Kind("embeddings switch TTT off", "way of calling", owned(WAY), off_by_embeddings, scenes=("inputs_embeds",)),
    Kind("cu_seq_lens are ignored", "way of calling", owned(f"{WAY} document-reset"), lengths_ignored, scenes=("cu_seq_lens",)),
    Kind("documents begin at position 0 alone", "way of calling", owned(WAY), documents_begin_at_zero,
         scenes=("positions from elsewhere",)),
    Kind("recomputation teaches less", "training", owned("gradient in-training"), recomputation_detached, (1.0, 0.3), count=2,
         scenes=("recomputed",)),
    Kind("copies of a cache share the state", "way of calling", owned(f"{WAY} take-back"), state_shared_by_copies,
         scenes=("copied cache",)),
    Kind("generation writes at its end", "way of calling", owned(WAY), written_after_generation, scenes=("after generation",)),
    Kind("the first η is saved for all", "save/load", owned("through-a-file"), first_eta_for_all, scenes=("checkpoint",),
         world={"settings": {"eta": (0.5, 2.0)}}),
    Kind("conv and P are frozen", "training", owned("start-identity gradient"), born_frozen, scenes=("training",)),
    Kind("the running sum has bfloat16's bits", "half precision", owned("precisions state-precision plain-sum"),
         with_rule(rounded_state), (8,), (only.IN_BFLOAT16,), 1, ("half precision",)),
)  # fmt: skip

"""Which tokens of a step's batch are whose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadata, LinearAttentionMetadataBuilder


@dataclass(frozen=True)
class Tokens:
    """One request's tokens [start, stop) of the batch, and its slot; seen: how many of its tokens were read before."""

    slot: int
    seen: int
    start: int
    stop: int


@dataclass
class Step(LinearAttentionMetadata):
    """What vLLM knows of a step, and its requests."""

    requests: list[Tokens] = field(default_factory=list)
    moved: list[tuple[Tokens, int]] | None = None

    def moves(self, handles: Tensor) -> list[tuple[Tokens, int]]:
        """The requests whose state lies in another slot than theirs, and that slot; from now on it lies in theirs."""
        if self.moved is None:
            slots = torch.tensor([request.slot for request in self.requests], device=handles.device)
            sources = handles[slots, 0].tolist()
            handles[slots, 0] = slots
            pairs = zip(self.requests, sources, strict=True)
            self.moved = [(request, source) for request, source in pairs if request.seen and source != request.slot]
        return self.moved


class StepBuilder(LinearAttentionMetadataBuilder):
    """Makes the step's `Step`, once for all layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Step:
        known = super().build(common_prefix_len, common_attn_metadata, fast_build)
        edges = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths, slots = known.seq_lens.tolist(), known.state_indices_tensor.tolist()
        requests = [
            Tokens(slot, length - (stop - start), start, stop)
            for slot, length, start, stop in zip(slots, lengths, edges, edges[1:], strict=False)
            if stop > start
        ]
        return Step(**vars(known), requests=requests)


class SlotBackend(LinearAttentionBackend):
    """The kind of attention that vLLM takes slots for."""

    @staticmethod
    def get_name() -> str:
        return "INPLACE_TTT"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return StepBuilder

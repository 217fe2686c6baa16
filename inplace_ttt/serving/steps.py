"""The requests of a step: their tokens in the batch, and their slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from .batch import NAME as BATCH
from .batch import Batch
from .engine_settings import ttt_config
from .snapshots import Snapshot


@dataclass(frozen=True)
class Tokens:
    """One request's tokens in the batch, and its slot.

    Attributes:
        slot: the request's slot.
        seen: the number of tokens that the slot's state has read before this step.
        start: index of the request's first token in the batch.
        stop: index after its last token.
        restores: the snapshot to load into the slot first, or None.
    """

    slot: int
    seen: int
    start: int
    stop: int
    restores: Snapshot | None = None


@dataclass
class Step(LinearAttentionMetadata):
    """vLLM's metadata of a step, and the step's requests."""

    requests: list[Tokens] = field(default_factory=list)
    moved: list[tuple[Tokens, int]] | None = None

    def moves(self, handles: Tensor) -> list[tuple[Tokens, int]]:
        """Returns the requests whose state is in another slot than their own, each with that slot.

        Afterwards `handles` [blocks, 1] name the requests' own slots, so the caller must copy the states.
        """
        if self.moved is None:
            slots = torch.tensor(
                [request.slot for request in self.requests], dtype=torch.int64, device=handles.device
            )
            sources = handles[slots, 0].tolist()
            handles[slots, 0] = slots
            pairs = zip(self.requests, sources, strict=True)
            goes_on = (
                (request, source) for request, source in pairs if request.seen and request.restores is None
            )
            self.moved = [(request, source) for request, source in goes_on if source != request.slot]
        return self.moved


class StepBuilder(LinearAttentionMetadataBuilder):
    """Builds the `Step` of each step, once for all layers."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.batch: Batch = vllm_config.compilation_config.static_forward_context[BATCH]
        config = ttt_config(vllm_config)
        self.only_reads = config is not None and config.target == "gradient"

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        known = super().build(common_prefix_len, common_attn_metadata, fast_build)
        edges = common_attn_metadata.query_start_loc_cpu.tolist()
        lengths, slots = known.seq_lens.tolist(), known.state_indices_tensor.tolist()
        requests = []
        for row, (slot, length, start, stop) in enumerate(
            zip(slots, lengths, edges, edges[1:], strict=False)
        ):
            settings, first = self.batch.begin(row, slot, length)
            if start < stop and not settings.off:
                read = length - (stop - start)
                seen = (0 if first is None else first.tokens) + (0 if self.only_reads else read)
                requests.append(Tokens(slot, seen, start, stop, None if read else first))
        return Step(**vars(known), requests=requests)


class SlotBackend(LinearAttentionBackend):
    """The attention backend under which vLLM runs the slots."""

    @staticmethod
    def get_name() -> str:
        return "INPLACE_TTT"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return StepBuilder

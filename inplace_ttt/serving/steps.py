"""vLLM's metadata of a step, with the requests' tokens and slots."""

from __future__ import annotations

from collections.abc import Iterator
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

from ..device_copies import on_device
from .batch import NAME as BATCH
from .batch import Batch
from .engine_settings import ttt_config
from .snapshots import Snapshot
from .tokens import StepTokens, Tokens


@dataclass
class Step(LinearAttentionMetadata):
    """vLLM's metadata of a step, and the step's requests.

    Attributes:
        tokens: the requests that read or write fast weights, sorted.
        moved: the requests of which the slot may be another one than in the step before.
    """

    tokens: StepTokens
    moved: list[Tokens] = field(default_factory=list)
    _copies: list[tuple[int, Tokens]] | None = None

    @property
    def restored(self) -> Iterator[tuple[Snapshot, Tokens]]:
        """Yields the snapshots to load, each with the request that starts from it."""
        return ((moved.restores, moved) for moved in self.moved if moved.restores is not None)

    def copies(self, handles: Tensor) -> list[tuple[int, Tokens]]:
        """Returns the slots to copy, each with the request whose slot receives the copy.

        Afterwards `handles` [blocks, 1] name the requests' own slots, so the caller must copy the states.
        """
        if self._copies is None:
            self._copies = []
            if self.moved:
                slots = on_device(torch.tensor([request.slot for request in self.moved]), handles.device)
                sources = handles[slots, 0].tolist()
                handles[slots, 0] = slots
                self._copies = [
                    (source, request)
                    for source, request in zip(sources, self.moved, strict=True)
                    if request.seen and request.restores is None and source != request.slot
                ]
        return self._copies


class StepBuilder(LinearAttentionMetadataBuilder):
    """Builds the `Step` of each step, once for all layers.

    The host waits for the device only if a request's slot may have changed.
    """

    # only parts of the model without fast weights are recorded in CUDA graphs
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
        assert config is not None
        self.chunk_size, self.only_reads = config.chunk_size, config.target == "gradient"
        self.has_one_block = vllm_config.cache_config.mamba_cache_mode == "none"

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        known = super().build(common_prefix_len, common_attn_metadata, fast_build)
        # the bound is exact without speculative decoding, which is refused
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        lengths = common_attn_metadata.seq_lens.cpu() if lengths is None else lengths
        edges = common_attn_metadata.query_start_loc_cpu.numpy()
        requests, moved, slots = list[Tokens](), list[Tokens](), None
        for row, (length, start, stop) in enumerate(
            zip(map(int, lengths.numpy()), map(int, edges), map(int, edges[1:]), strict=False)
        ):
            read = length - (stop - start)
            block = 0 if self.has_one_block else max(length - 1, 0) // self.kv_cache_spec.block_size
            held = self.batch.row(row)
            first = self.batch.start_of(held)
            before = 0 if first is None else first.tokens
            moves = not held.goes_on(before + read, block)
            if moves:
                slots = known.state_indices_tensor.tolist() if slots is None else slots
                held.slot, held.block = slots[row], block
            held.tokens = before + length
            if start < stop and not held.settings.off:
                assert held.slot is not None
                seen = before if self.only_reads else before + read
                requests.append(Tokens(held.slot, seen, start, stop, None if read else first))
                if moves:
                    moved.append(requests[-1])
        tokens = StepTokens.of(requests, self.chunk_size, known.seq_lens.device)
        return Step(**vars(known), tokens=tokens, moved=moved)


class SlotBackend(LinearAttentionBackend):
    """The attention backend under which vLLM runs the slots."""

    @staticmethod
    def get_name() -> str:
        return "INPLACE_TTT"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return StepBuilder

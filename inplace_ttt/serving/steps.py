"""vLLM's metadata of a step, with the requests' tokens, and the slots' preparation for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device_copies import on_device
from .batch import NAME as BATCH
from .batch import Batch
from .engine_settings import ttt_config
from .snapshots import Snapshot
from .tokens import SingleTokens, StepTokens, Tokens
from .vllm_names import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    KVCacheSpec,
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
    VllmConfig,
)


@dataclass
class Step(LinearAttentionMetadata):
    """vLLM's metadata of a step, and the tokens that read and write fast weights."""

    tokens: StepTokens


@dataclass(frozen=True)
class Move:
    """A request whose slot may be another one than in the step before.

    Attributes:
        slot: its slot now.
        seen: the number of tokens that its state has read.
        restores: the snapshot that its state starts from; None for the state that it had.
    """

    slot: int
    seen: int
    restores: Snapshot | None


class StepBuilder(LinearAttentionMetadataBuilder):
    """Builds the `Step` of each step, once for all layers, and prepares the slots for it.

    Afterwards a step of single tokens only reads and stores at addresses that never change, so that a CUDA
    graph can record it. The host waits for the device only if a request's slot may have changed.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

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
        self.single = SingleTokens(vllm_config.scheduler_config.max_num_seqs, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        known = super().build(common_prefix_len, common_attn_metadata, fast_build)
        # the bound is exact without speculative decoding, which is refused
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        lengths = common_attn_metadata.seq_lens.cpu() if lengths is None else lengths
        edges = common_attn_metadata.query_start_loc_cpu.numpy()
        slots = functools.cache(known.state_indices_tensor.tolist)
        requests, moved = list[Tokens](), list[Move]()
        for row, (length, start, stop) in enumerate(
            zip(map(int, lengths.numpy()), map(int, edges), map(int, edges[1:]), strict=False)
        ):
            if start < stop:
                requests.append(self._tokens(row, length, start, stop, slots, moved))
        self._move(moved)
        return Step(**vars(known), tokens=self._prepared(requests))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        known = super().build(0, common_attn_metadata)
        self.single.put(())
        return Step(**vars(known), tokens=StepTokens(self.single))

    def _tokens(
        self, row: int, length: int, start: int, stop: int, slots: Callable[[], list[int]], moved: list[Move]
    ) -> Tokens:
        """Returns a request's tokens, with slot 0 if its fast weights are off.

        Args:
            row: the request's index in the batch.
            length: the number of its tokens after this step.
            start: index of its first token in the batch.
            stop: index after its last token.
            slots: returns the slots of all requests.
            moved: receives the request's move if its slot may be another one than before.
        """
        read = length - (stop - start)
        block = 0 if self.has_one_block else max(length - 1, 0) // self.kv_cache_spec.block_size
        held = self.batch.row(row)
        first = self.batch.start_of(held)
        before = 0 if first is None else first.tokens
        seen = before if self.only_reads else before + read
        moves = not held.goes_on(before + read, block)
        if moves:
            held.slot, held.block = slots()[row], block
        held.tokens = before + length
        assert held.slot is not None
        slot = 0 if held.settings.off else held.slot
        if moves and slot:
            moved.append(Move(slot, seen, None if read else first))
        return Tokens(slot, seen, start, stop)

    def _prepared(self, requests: Sequence[Tokens]) -> StepTokens:
        """Sorts the requests, and prepares the reads of single tokens."""
        longer, single, reading = list[Tokens](), list[tuple[int, int, int, int]](), set[int]()
        for request in requests:
            written, filled = divmod(request.seen, self.chunk_size)
            if request.stop - request.start > 1:
                longer.append(request)
            elif request.slot == 0:
                single.append((request.start, 0, 0, 0))
            else:
                single.append((request.start, request.slot if written else 0, request.slot, filled))
                if written:
                    reading.add(request.slot)
                if filled + 1 == self.chunk_size and not self.only_reads:
                    self.batch.full.append((request.slot, written))
        for layer in self.batch.fast_weights.values():
            layer.slots.refresh(reading)
        self.single.put(single)
        # vLLM warms up with slot 0, which no request has
        writing = tuple(request for request in longer if request.slot)
        return StepTokens(self.single, writing, alone=not longer)

    def _move(self, moved: Sequence[Move]) -> None:
        """Copies or restores the states of requests into their slots, in all layers."""
        if not moved:
            return
        layers = self.batch.fast_weights
        handles = next(iter(layers.values())).handle.kv_cache[0]
        slots = on_device(torch.tensor([move.slot for move in moved]), handles.device)
        sources = handles[slots, 0].tolist()
        handles[slots, 0] = slots
        for source, move in zip(sources, moved, strict=True):
            for index, layer in layers.items():
                if move.restores is not None:
                    layer.slots.restore(move.slot, move.restores.layers[index])
                elif move.seen and source != move.slot:
                    layer.slots.copy(source, move.slot, move.seen)


class SlotBackend(LinearAttentionBackend):
    """The attention backend under which vLLM runs the slots."""

    @staticmethod
    def get_name() -> str:
        return "INPLACE_TTT"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return StepBuilder

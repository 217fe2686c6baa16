"""The worker's side of memories: settings of the batch's requests, and snapshots.

vLLM informs its logits processors, before each forward, of requests that join, leave or move in the batch.
`Batch` is such a processor, and leaves the logits unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams

from ..layer.fast_linear import FastWeight
from .request_settings import RequestSettings
from .snapshots import Ended, Snapshot
from .vllm_names import BatchUpdate, LogitsProcessor, MoveDirectionality, VllmConfig

NAME = "inplace_ttt.batch"
"""Key of the batch in `static_forward_context`, where vLLM finds its layers by name."""


@dataclass
class Row:
    """A request in the batch.

    Attributes:
        settings: the request's fast-weight settings.
        slot: the slot that it writes; None before its first step.
        block: the index of the slot's block among the request's blocks.
        tokens: the number of tokens that its state has read, including those of the snapshot `start`.
    """

    settings: RequestSettings
    slot: int | None = None
    block: int = 0
    tokens: int = 0

    def goes_on(self, tokens: int, block: int) -> bool:
        """Returns True if the state has read this number of tokens, and its block is still the same."""
        return self.slot is not None and (self.tokens, self.block) == (tokens, block)


class Batch(LogitsProcessor):
    """The requests of the batch and the worker's snapshots, as a logits processor of vLLM.

    Attributes:
        rows: the requests by their index in the coming batch.
        snapshots: the worker's snapshots by id.
        left: the fast weights of requests that ended or were preempted, by their setting `keep`.
        full: slots whose open chunk the last step completed, each with its number of chunks written before.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, Row] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.left: dict[str, Ended] = {}
        self.full: list[tuple[int, int]] = []
        self._context = vllm_config.compilation_config.static_forward_context
        self._context[NAME] = self

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        RequestSettings.checked(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            gone = (*batch_update.removed, *(index for index, _, _, _ in batch_update.added))
            self._leave([self.rows.pop(index) for index in gone if index in self.rows])
        self._write(self.full)
        if batch_update is None:
            return
        for index, params, _, _ in batch_update.added:
            self.rows[index] = Row(RequestSettings.of(params))
            self.left.pop(self.rows[index].settings.keep or "", None)  # it was preempted and is back
        for source, target, direction in batch_update.moved:
            moved, there = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if there is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = there

    def row(self, index: int) -> Row:
        """Returns the request with this index in the batch."""
        return self.rows.get(index) or Row(RequestSettings())  # vLLM warms up with rows that were never added

    def start_of(self, row: Row) -> Snapshot | None:
        """Returns the snapshot that a request starts from, or None."""
        return None if row.settings.start is None else self.snapshots[row.settings.start]

    def keep(self, name: str, read: int) -> Snapshot | None:
        """Returns the snapshot of the request whose `keep` is `name`, once; None if it is unknown.

        Args:
            name: the request's `keep`.
            read: the number of tokens that it has read, by its answer.
        """
        self._leave([row for row in self.rows.values() if row.settings.keep == name])
        ended = self.left.get(name)
        self.forget(name)
        return None if ended is None else ended.after(read)

    def forget(self, name: str) -> None:
        """Drops the snapshot of the request whose `keep` is `name`, or prevents it."""
        self.left.pop(name, None)
        for row in self.rows.values():
            if row.settings.keep == name:
                row.settings = replace(row.settings, keep=None)

    @cached_property
    def fast_weights(self) -> dict[int, Any]:
        """The served down-projections (`FastRowParallelLinear`) by decoder layer."""
        return {layer.fast.layer: layer for layer in self._context.values() if isinstance(layer, FastWeight)}

    def _snapshot(self, slot: int, tokens: int) -> Snapshot:
        """Copies a slot's content after `tokens` tokens."""
        held = {index: layer.slots.held(slot, tokens) for index, layer in self.fast_weights.items()}
        return Snapshot(held, tokens)

    def _leave(self, rows: Sequence[Row]) -> None:
        """Keeps the fast weights of requests that end or are preempted, if their settings ask for it.

        From the next step on, other requests may write their slots.
        """
        for row in rows:
            if row.settings.keep is not None and row.slot is not None:
                full = [(slot, written) for slot, written in self.full if slot == row.slot]
                before = self._snapshot(row.slot, row.tokens - 1) if full else None
                self._write(full)
                self.left[row.settings.keep] = Ended(self._snapshot(row.slot, row.tokens), before)

    @torch.inference_mode()
    def _write(self, full: Sequence[tuple[int, int]]) -> None:
        """Writes the chunks that single tokens of the last step completed, in all layers.

        The step itself only stores these tokens, so that a CUDA graph can record it. Nothing reads or copies
        such a slot between that step and this call.
        """
        for slot, written in full:
            for layer in self.fast_weights.values():
                layer.slots.write_full(slot, written, layer)
        self.full = [one for one in self.full if one not in full]

"""What the requests of a step's batch say of their fast weights, and what they leave behind: the worker's
side of memories.

vLLM tells its logits processors before each forward which request is where in the batch. This one changes no
logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ..layer.fast_linear import FastWeight
from .request_settings import RequestSettings
from .snapshots import Snapshot

NAME = "inplace_ttt.batch"
"""Where vLLM's layers are found by name, this is found by this one."""


@dataclass
class Row:
    """A request in the batch. slot: where it writes, None before its first step; tokens: what the slot has
    read, those of `start` too."""

    settings: RequestSettings
    slot: int | None = None
    tokens: int = 0


class Batch(LogitsProcessor):
    """rows: of the batch that comes, in its order. snapshots: by id. left: what requests that went away had
    written, by `keep`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, Row] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.left: dict[str, Snapshot] = {}
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
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._leave(index)
        for index, params, _, _ in batch_update.added:
            self._leave(index)
            self.rows[index] = Row(RequestSettings.of(params))
            self.left.pop(self.rows[index].settings.keep or "", None)  # it had to make room, and is back
        for source, target, direction in batch_update.moved:
            moved, there = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if there is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = there

    def begin(self, row: int, slot: int, read: int) -> tuple[RequestSettings, Snapshot | None]:
        """Note the slot of a row's request, and that it will have read so many of its tokens after this
        step."""
        known = self.rows.get(row) or Row(RequestSettings())  # vLLM warms up with rows of its own
        start = None if known.settings.start is None else self.snapshots[known.settings.start]
        known.slot, known.tokens = slot, read + (0 if start is None else start.tokens)
        return known.settings, start

    def keep(self, name: str) -> Snapshot | None:
        """What the request of that `keep` has written; None where no request has it."""
        for row in self._keeping(name):
            if row.slot is not None:
                row.settings = replace(row.settings, keep=None)
                return self._snapshot(row.slot, row.tokens)
        return self.left.pop(name, None)

    def forget(self, name: str) -> None:
        """Keep nothing of the request of that `keep`."""
        self.left.pop(name, None)
        for row in self._keeping(name):
            row.settings = replace(row.settings, keep=None)

    @cached_property
    def fast_weights(self) -> dict[int, Any]:
        """The served down-projections by decoder layer, `FastRowParallelLinear`s."""
        return {layer.fast.layer: layer for layer in self._context.values() if isinstance(layer, FastWeight)}

    def _snapshot(self, slot: int, tokens: int) -> Snapshot:
        return Snapshot.of({index: layer.slots for index, layer in self.fast_weights.items()}, slot, tokens)

    def _keeping(self, name: str) -> list[Row]:
        return [row for row in self.rows.values() if row.settings.keep == name]

    def _leave(self, index: int) -> None:
        """A request has ended or made room: its slot may be another's from this step on."""
        row = self.rows.pop(index, None)
        if row is not None and row.settings.keep is not None and row.slot is not None:
            self.left[row.settings.keep] = self._snapshot(row.slot, row.tokens)

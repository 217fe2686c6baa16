"""The gradient steps of complete chunks, for `target: gradient`.

A chunk is read with gradients, and every layer writes its targets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .errors import InPlaceTTTError
from .families import CACHE
from .language_head import loss_gradient
from .layer.cache import plain_class, stop_recording, stream_of, streams
from .layer.fast_linear import FastWeight
from .layer.gradient_stream import GradientStream, Tape
from .layer.overrides import overriding

Call = Callable[..., Any]


@dataclass(frozen=True)
class GradientSteps:
    """The gradient steps of one model.

    Attributes:
        lm: the model with its head, which computes the loss.
        call: the base's own `__call__`.
        layers: the TTT layers by index.
    """

    lm: nn.Module
    call: Call
    layers: dict[int, FastWeight]

    @property
    def first(self) -> FastWeight:
        """The first TTT layer. All layers have the same config."""
        return next(iter(self.layers.values()))

    @property
    def count(self) -> int:
        """Steps per chunk."""
        return self.first.fast.config.steps_per_chunk

    def streams(self, cache: Cache, batch: int) -> GradientStream:
        """Returns the first layer's stream in a cache, and creates missing streams."""
        for index, layer in self.layers.items():
            stream_of(cache, index, batch, layer.fast.config)
        return first_stream(cache)

    def read_whole_chunk(self, piece: dict[str, Any], cache: Cache) -> tuple[Any, Tape]:
        """Reads a whole chunk of every row with gradients, and writes it.

        Args:
            piece: arguments of the base model's forward.
            cache: the cache among them.

        Returns:
            The output, and the keys and targets of the first step.
        """
        ids = piece["input_ids"]
        tape, first = Tape(), self.streams(cache, len(ids))
        if self.count > 1:
            cache.activate_past_recording()
        with overriding(streams(cache).values(), tape=tape):
            output = self._gradients(piece, tape)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        end, positions = cache.get_seq_length(), piece.get("position_ids")
        if positions is None:
            positions = torch.arange(end - ids.shape[1], end, device=ids.device)
        for stream in streams(cache).values():
            assert isinstance(stream, GradientStream)
            stream.count(ids, positions.expand_as(ids), [(0, stream.chunk_size)] * stream.batch)
        self.write(piece, cache, [*range(first.batch)], tape)
        if self.count > 1:
            stop_recording(cache)
        return output, tape

    def write(self, piece: dict[str, Any], cache: Cache, rows: list[int], tape: Tape | None = None) -> None:
        """Writes the complete chunks of some rows, which end with the piece.

        Args:
            piece: arguments of the base model's forward.
            cache: the cache among them.
            rows: the rows with a complete chunk.
            tape: keys and targets of the first step, if the piece was read with gradients.
        """
        held = {
            index: stream for index, stream in streams(cache).items() if isinstance(stream, GradientStream)
        }
        before = {
            index: None if stream.state is None else stream.state[rows] for index, stream in held.items()
        }
        for step in range(self.count):
            if step or tape is None:
                tape = self._again(piece, cache, rows)
            for index, stream in held.items():
                stream.write_chunks(rows, tape.keys[index], tape.probes[index], self.layers[index])
        for index, stream in held.items():
            stream.close_chunks(rows, before[index])

    def _again(self, piece: dict[str, Any], cache: Cache, rows: list[int]) -> Tape:
        """Reads the complete chunks of these rows again, with gradients, after the KV cache before them.

        Raises InPlaceTTTError if a chunk contains padding, or tokens that were read with TTT off.
        """
        first, tape = first_stream(cache), Tape()
        if any(first.rows[row].unbroken < first.chunk_size for row in rows):
            raise InPlaceTTTError(
                "a chunk has padding or tokens read with TTT off among its tokens, so its gradient cannot be "
                "computed; pad at the left, and read a text with TTT on."
            )
        ids, positions = (
            torch.stack(parts) for parts in zip(*(first.tokens_of(row) for row in rows), strict=True)
        )
        alone = {
            "input_ids": ids,
            CACHE: _before_chunk(cache, rows, first.chunk_size, tape),
            "use_cache": True,
        }
        if piece.get("position_ids") is not None:
            alone["position_ids"] = positions
        if (mask := piece.get("attention_mask")) is not None:
            alone["attention_mask"] = mask[rows, : cache.get_seq_length()]
        self._gradients(alone, tape)
        return tape

    def _gradients(self, piece: dict[str, Any], tape: Tape) -> Any:
        """Reads a piece, and turns the tape's probes into targets V. Returns the output without a graph."""
        asking = [parameter for parameter in self.lm.parameters() if parameter.requires_grad]
        with overriding(asking, requires_grad=False), torch.enable_grad():
            output = self.call(**piece)
            upstream = loss_gradient(self.lm, output, piece["input_ids"])
            found = torch.autograd.grad(output.last_hidden_state, list(tape.probes.values()), upstream)
        for index, gradient in zip(tape.probes, found, strict=True):
            tape.probes[index] = self.layers[index].targets(gradient).to(tape.keys[index].dtype)
        output.last_hidden_state = output.last_hidden_state.detach()
        return output


def first_stream(cache: Cache) -> GradientStream:
    """Returns the cache's first stream. All streams hold the same tokens."""
    stream = next(iter(streams(cache).values()))
    assert isinstance(stream, GradientStream)
    return stream


def _before_chunk(cache: Cache, rows: list[int], chunk: int, tape: Tape) -> Cache:
    """Returns some rows of a cache without their last `chunk` tokens. Its streams read and do not write."""
    before = copy.copy(cache)
    before.layers = [copy.copy(layer) for layer in cache.layers]
    every = rows == [*range(first_stream(cache).batch)]
    for layer in before.layers:
        shorter = (x[:, :, : x.shape[2] - chunk] for x in (layer.keys, layer.values))
        layer.keys, layer.values = shorter if every else (x[rows] for x in shorter)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length -= chunk
        if isinstance(stream := getattr(layer, "fast_weight", None), GradientStream):
            layer.fast_weight = stream.on_tape(rows, tape)
    return before


def refuse_other_layers(cache: Cache) -> None:
    """Raises InPlaceTTTError for caches that cannot drop a chunk.

    Static, quantized and indexed caches cannot, nor can the states of linear attention.
    """
    for layer in cache.layers:
        plain = plain_class(layer)
        if plain is not DynamicLayer and not issubclass(plain, DynamicSlidingWindowLayer):
            raise InPlaceTTTError(
                "target='gradient' reads a chunk again and needs plain keys and values, but this cache has a "
                f"{plain.__name__}; use a DynamicCache."
            )

"""Reading with `target: gradient` (extension): each chunk takes one step of its own loss, and later chunks read the changed weight.

Of one document, with the KV cache of earlier tokens as a constant:

    o_t = W0 z_t + η M_i k_t              every token of chunk i, in every TTT layer; M_i is read of the state S_i
    L_i = Σ_t -log p(x_{t+1} | x_≤t)      over the chunk's tokens but the last, whose next token is not in the chunk
    V_t = -gain ∂L_i/∂o_t                 with S_i a constant
    S_{i+1} = S_i + what the rule writes of (k_t, V_t)

An incomplete chunk writes nothing. A forward is cut where a chunk of any row ends. A piece that is one whole chunk of every row runs with
gradients; other pieces run without, and a chunk that they complete runs again, alone, behind the same KV cache.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .errors import InPlaceTTTError
from .families import CACHE, cache_in
from .language_head import loss_gradient
from .layer.cache import plain_class, stop_recording, streams
from .layer.fast_linear import FastWeight, fast_weights
from .layer.gradient_stream import GradientStream, Tape
from .layer.overrides import overriding
from .layer.stream import FastWeightStream
from .layout import ChunkLayout, Span, document_starts

Call = Callable[..., Any]


class ReadsByGradient:
    """Mixin over a base model's own class: its call, in pieces."""

    reading: GradientReading

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (type(self).__mro__[2],), self.__dict__  # pickle would look the class up by its name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reading.read(super().__call__, args, kwargs)  # type: ignore[misc]


def _class_of(plain: type) -> type:
    return type(plain.__name__, (ReadsByGradient, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


def _empty(plain: type) -> Any:
    made: Any = _class_of(plain)
    return made.__new__(made)


def install(lm: nn.Module, base: nn.Module) -> None:
    """Let the base of a causal LM, whose layers have `target: gradient`, read in pieces and write by gradients."""
    base.__class__ = _class_of(type(base))
    base.reading = GradientReading(lm, base)  # type: ignore[assignment]


def remove(base: nn.Module) -> None:
    """Undo `install`."""
    if isinstance(base, ReadsByGradient):
        del base.reading
        base.__class__ = type(base).__mro__[2]


class GradientReading:
    """Reads for one model. lm: the model with its head, which gives the loss; base: the model below the head."""

    def __init__(self, lm: nn.Module, base: Any) -> None:
        self.lm, self.base = lm, base
        self.names = [name for name in inspect.signature(base.forward).parameters if name != "self"]

    @torch.compiler.disable(reason="a chunk is written between two forwards")
    def read(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the base model's output for these arguments. call: the base's own `__call__`."""
        layers = fast_weights(self.lm)
        if not next(iter(layers.values())).hooks.model.enabled:
            return call(*args, **kwargs)
        if self.base.training:
            raise InPlaceTTTError("target='gradient' cannot be trained yet; call model.eval(), or choose another target.")
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache, keeps = self._cache(given), given.get("use_cache")
        _refuse_other_layers(cache)
        with torch.no_grad():
            outputs = [self._piece(call, piece, cache, layers) for piece in self._pieces(given, cache, layers)]
        whole = outputs[-1]
        whole.last_hidden_state = torch.cat([output.last_hidden_state for output in outputs], dim=1)
        if getattr(whole, "hidden_states", None) is not None:
            whole.hidden_states = tuple(
                torch.cat(parts, dim=1) for parts in zip(*(output.hidden_states for output in outputs), strict=True)
            )
        if keeps is False:
            whole[CACHE] = None
        return whole

    def _cache(self, given: dict[str, Any]) -> Cache:
        """Returns the cache that a forward was given, or a new one."""
        cache = cache_in(given)
        return DynamicCache(config=self.base.config.get_text_config()) if cache is None else cache

    def _pieces(self, given: dict[str, Any], cache: Cache, layers: dict[int, FastWeight]) -> Iterator[dict[str, Any]]:
        """Yields the arguments of each piece, after the piece before it was read."""
        ids, mask, positions = given.get("input_ids"), given.get("attention_mask"), given.get("position_ids")
        if ids is None or given.get("inputs_embeds") is not None:
            raise InPlaceTTTError("target='gradient' learns to predict token ids, and this forward has embeddings; pass input_ids alone.")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise InPlaceTTTError("target='gradient' reads rows with a 2-D attention_mask [B, T], or none; pass one of these.")
        if given.get("output_attentions"):
            raise InPlaceTTTError("target='gradient' reads in pieces, whose attentions do not fit together; leave output_attentions out.")
        packed = False
        if positions is not None and positions.dim() == 2 and ids.shape[1] > 1 and mask is None:
            packed = bool(document_starts(positions)[:, 1:].any())
        if packed or given.get("cu_seq_lens_q") is not None:
            raise InPlaceTTTError("target='gradient' reads one document per row; give packed documents rows of their own.")
        past, chunk = int(cache.get_seq_length()), next(iter(layers.values())).chunk_size
        held = next(iter(streams(cache).values()), None)
        filled = [0] * len(ids) if held is None or held.batch != len(ids) else held.filled
        ends = sorted({ids.shape[1], *_borders(_spans(ids, mask, past), filled, chunk)})
        for start, stop in zip([0, *ends], ends, strict=False):
            piece = {**given, "input_ids": ids[:, start:stop], CACHE: cache, "use_cache": True}
            if mask is not None:
                piece["attention_mask"] = mask[:, : past + stop]
            if positions is not None:
                piece["position_ids"] = positions[..., start:stop]
            if (places := given.get("cache_position")) is not None:
                piece["cache_position"] = places[start:stop]
            yield piece

    def _piece(self, call: Call, piece: dict[str, Any], cache: Cache, layers: dict[int, FastWeight]) -> Any:
        """Read a piece, and write the chunks that it completes."""
        held = streams(cache)
        if len(held) == len(layers) and _is_whole_chunk(piece, next(iter(held.values()))):
            return self._learn_whole(call, piece, cache, layers)
        cache.activate_past_recording()  # a layer with a window keeps what the open chunk may ask for again
        output = call(**piece)
        first = _first(cache)
        for row in first.complete:
            self._learn_again(call, piece, cache, row, layers)
        if not any(first.filled):
            stop_recording(cache)
        return output

    def _learn_whole(self, call: Call, piece: dict[str, Any], cache: Cache, layers: dict[int, FastWeight]) -> Any:
        """Read a whole chunk of every row with gradients, and write it."""
        tape, held = Tape(), streams(cache)
        with overriding(held.values(), tape=tape):
            output = self._gradients(call, piece, tape, layers)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        ids, end = piece["input_ids"], cache.get_seq_length()
        positions = piece.get("position_ids")
        if positions is None:
            positions = torch.arange(end - ids.shape[1], end, device=ids.device)
        for index, stream in held.items():
            assert isinstance(stream, GradientStream)
            stream.count(ids, positions.expand_as(ids), [(0, stream.chunk_size)] * stream.batch)
            for row in range(stream.batch):
                stream.write_chunk(row, tape.keys[index][row], tape.probes[index][row], layers[index])
        return output

    def _learn_again(self, call: Call, piece: dict[str, Any], cache: Cache, row: int, layers: dict[int, FastWeight]) -> None:
        """Read a row's complete chunk once more, alone and with gradients, behind the KV cache that it had; and write it."""
        held, tape = streams(cache), Tape()
        first = _first(cache)
        if first.rows[row].unbroken < first.chunk_size:
            raise InPlaceTTTError(
                "a chunk has padding or tokens read with TTT off among its tokens, so that its gradient is not known; pad at the left, "
                "and read a text with TTT on."
            )
        ids, positions = first.tokens_of(row)
        alone = {"input_ids": ids[None], CACHE: _before_chunk(cache, row, first.chunk_size, tape), "use_cache": True}
        if piece.get("position_ids") is not None:
            alone["position_ids"] = positions[None]
        if (mask := piece.get("attention_mask")) is not None:
            alone["attention_mask"] = mask[row : row + 1, : cache.get_seq_length()]
        self._gradients(call, alone, tape, layers)
        for index, stream in held.items():
            assert isinstance(stream, GradientStream)
            stream.write_chunk(row, tape.keys[index][0], tape.probes[index][0], layers[index])

    def _gradients(self, call: Call, piece: dict[str, Any], tape: Tape, layers: dict[int, FastWeight]) -> Any:
        """Read a piece; the tape's probes become the targets V. Returns the output without a graph."""
        asking = [parameter for parameter in self.lm.parameters() if parameter.requires_grad]
        with overriding(asking, requires_grad=False), torch.enable_grad():
            output = call(**piece)
            upstream = loss_gradient(self.lm, output, piece["input_ids"])
            found = torch.autograd.grad(output.last_hidden_state, list(tape.probes.values()), upstream)
        for index, gradient in zip(tape.probes, found, strict=True):
            tape.probes[index] = layers[index].targets(gradient).to(tape.keys[index].dtype)
        output.last_hidden_state = output.last_hidden_state.detach()
        return output


def _first(cache: Cache) -> GradientStream:
    """Returns the first stream of the cache; all streams hold the same tokens."""
    stream = next(iter(streams(cache).values()))
    assert isinstance(stream, GradientStream)
    return stream


def _spans(ids: Tensor, mask: Tensor | None, past: int) -> list[Span]:
    """Returns the span of each row's tokens without padding."""
    batch, length = ids.shape
    if mask is None:
        return [(0, length)] * batch
    rows = ChunkLayout.from_attention_mask(mask[:, past : past + length], chunk_size=1).documents
    return [row[0] if row else (0, 0) for row in rows]


def _borders(spans: list[Span], filled: list[int], chunk: int) -> Iterator[int]:
    """Yields the places where a chunk of some row ends."""
    for (start, stop), held in zip(spans, filled, strict=True):
        yield from range(start + chunk - held, stop + 1, chunk)


def _is_whole_chunk(piece: dict[str, Any], stream: FastWeightStream) -> bool:
    """Returns True if the piece is one whole chunk of every row, without padding."""
    ids, mask = piece["input_ids"], piece.get("attention_mask")
    if ids.shape != (stream.batch, stream.chunk_size) or any(stream.filled):
        return False
    return mask is None or bool(mask[:, -stream.chunk_size :].all())


def _before_chunk(cache: Cache, row: int, chunk: int, tape: Tape) -> Cache:
    """Returns one row of a cache without its last `chunk` tokens; its streams read and write nothing."""
    before = copy.copy(cache)
    before.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in before.layers:
        layer.keys, layer.values = (x[row : row + 1, :, : x.shape[2] - chunk] for x in (layer.keys, layer.values))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length -= chunk
        if isinstance(stream := getattr(layer, "fast_weight", None), GradientStream):
            layer.fast_weight = stream.on_tape(row, tape)
    return before


def _refuse_other_layers(cache: Cache) -> None:
    """Refuses caches that cannot drop a chunk: static, quantized and indexed ones, and states of linear attention."""
    for layer in cache.layers:
        plain = plain_class(layer)
        if plain is not DynamicLayer and not issubclass(plain, DynamicSlidingWindowLayer):
            raise InPlaceTTTError(
                f"target='gradient' reads again behind plain keys and values, and this cache has a {plain.__name__}; use a DynamicCache."
            )

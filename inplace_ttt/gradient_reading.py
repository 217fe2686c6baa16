"""Reading with `target: gradient` (extension).

The model makes one gradient step on each chunk's own loss, and later chunks read the changed weight. For one
document, with the KV cache of earlier tokens as a constant:

    o_t = W0 z_t + η M_i k_t              each token of chunk i, in each TTT layer; M_i is the matrix that the
                                          rule reads from the state S_i
    L_i = Σ_t -log p(x_{t+1} | x_≤t)      over the chunk's tokens except the last; its next token is outside
    V_t = -gain ∂L_i/∂o_t                 with S_i as a constant
    S_{i+1} = S_i + the rule's write of (k_t, V_t)

An incomplete chunk writes nothing. With `steps_per_chunk` above 1 the last three lines are repeated. Each
step then starts from the state after the step before. Later tokens attend to the KV cache of the first step.

A forward into a cache is cut into pieces wherever a chunk of any row ends. A piece that is one whole chunk of
every row runs with gradients. Other pieces run without gradients. If such a piece completes a chunk, the
chunk runs again with gradients, after the same KV cache. Training and packed rows use no cache. Their targets
are computed first, in the same way, and one parallel forward then reads all chunks.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from .documents import document_starts
from .errors import InPlaceTTTError
from .families import CACHE, cache_in, features
from .gradient_steps import Call, GradientSteps, first_stream, refuse_other_layers
from .layer.cache import stop_recording, streams
from .layer.fast_linear import FastWeight
from .layer.graph_ops import document_spans
from .layer.installing import fast_weights
from .layer.overrides import overriding
from .layer.per_thread import this_thread
from .layer.quantized import packs_for_inference
from .layer.sequence_parallel import ulysses_group
from .layer.stream import FastWeightStream
from .layer.zero3 import is_partitioned
from .layout import ChunkLayout, Span


class ReadsByGradient:
    """Mixin for the class of a base model. It makes the model's forward read in pieces."""

    reading: GradientReading

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (type(self).__mro__[2],), self.__dict__  # pickle would find the plain class by name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reading.read(super().__call__, args, kwargs)  # type: ignore[misc]


def _class_of(plain: type) -> type:
    return type(
        plain.__name__,
        (ReadsByGradient, plain),
        {"__module__": plain.__module__, "__qualname__": plain.__qualname__},
    )


def _empty(plain: type) -> Any:
    made: Any = _class_of(plain)
    return made.__new__(made)


def install(lm: nn.Module, base: nn.Module) -> None:
    """Makes the base of a causal LM with `target: gradient` read in pieces and write gradient targets.

    Args:
        lm: the model with its head.
        base: the model below the head, changed in place.
    """
    base.__class__ = _class_of(type(base))
    base.reading = GradientReading(lm, base)  # type: ignore[assignment]


def remove(base: nn.Module) -> None:
    """Undoes `install`."""
    if isinstance(base, ReadsByGradient):
        del base.reading
        base.__class__ = type(base).__mro__[2]


class GradientReading:
    """The reading of one model with `target: gradient`.

    Args:
        lm: the model with its head, which computes the loss.
        base: the model below the head.
    """

    def __init__(self, lm: nn.Module, base: Any) -> None:
        self.lm, self.base, self._has_gradients = lm, base, False
        self.layers = fast_weights(lm)
        self.names = [name for name in inspect.signature(base.forward).parameters if name != "self"]

    @torch.compiler.disable(reason="a chunk is written between two forwards")
    def read(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the base model's output for the given arguments.

        Args:
            call: the base's own `__call__`.

        Raises:
            InPlaceTTTError: if the arguments or the setup do not work with `target: gradient`.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                # autograd cannot save tensors made in inference mode
                return self.read(
                    call, tuple(map(_normal, args)), {name: _normal(value) for name, value in kwargs.items()}
                )
        steps = GradientSteps(self.lm, call, self.layers)
        if not steps.first.hooks.model.enabled:
            return call(*args, **kwargs)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        self._refuse_parts(steps)
        _refuse_what_has_no_ids(given)
        return (
            self._read_whole(given, steps)
            if self._wants_whole(given, steps)
            else self._read_in_pieces(given, steps)
        )

    def _wants_whole(self, given: dict[str, Any], steps: GradientSteps) -> bool:
        """Returns True if rows are read in one forward.

        That is the case in training, for packed rows, if parameters need gradients, and if an observer is
        set.
        """
        if self.base.training or cache_in(given) is not None or given.get("use_cache"):
            return bool(self.base.training)
        learns = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in self.lm.parameters()
        )
        observed = steps.first.fast.observer is not None
        return _is_packed(given) or observed or (learns and steps.count == 1)

    def _refuse_parts(self, steps: GradientSteps) -> None:
        """Raises InPlaceTTTError if ranks share rows or parameters, or no gradient passes through the
        weights.

        The gradient of a document needs the whole row and all parameters on one rank.
        """
        if not self._has_gradients and packs_for_inference(self.lm):
            raise InPlaceTTTError(
                "target='gradient' computes gradients through the weights, but bitsandbytes packs 4-bit "
                "weights for inference on this CPU; load the base in 8 bits or unquantized, or use a GPU."
            )
        self._has_gradients = True
        if steps.first.hooks.model.group is not None or (self.base.training and ulysses_group() is not None):
            raise InPlaceTTTError(
                "target='gradient' reads whole rows, but here ranks share them; give each rank its own rows."
            )
        if self.base.training and any(
            is_partitioned(p) or hasattr(p, "device_mesh") for p in self.lm.parameters()
        ):
            raise InPlaceTTTError(
                "with target='gradient' ranks read unequal numbers of chunks, so they cannot share "
                "parameters (ZeRO-3, FSDP); use DDP, or DeepSpeed's ZeRO stage 2."
            )

    def _read_whole(self, given: dict[str, Any], steps: GradientSteps) -> Any:
        """Computes the targets, then reads whole rows in one forward, in which the targets are constants."""
        if cache_in(given) is not None:
            raise InPlaceTTTError(
                "target='gradient' trains on whole rows, without a cache; pass use_cache=False, or call "
                "model.eval()."
            )
        if steps.count > 1:
            raise InPlaceTTTError(
                "steps_per_chunk above 1 reads one text per row, and cannot be trained; set it to 1, or "
                "call model.eval() and give packed documents rows of their own."
            )
        with overriding([this_thread()], targets=self._targets(given, steps)):
            return steps.call(**{**given, "use_cache": False})

    def _targets(self, given: dict[str, Any], steps: GradientSteps) -> dict[int, Tensor]:
        """Returns the targets V [B, T, d] of each layer, by its index, for a forward of whole rows.

        Targets are zero for tokens whose writes no later token reads. The documents are read as the rows of
        one batch, from their first tokens, sorted by length. A document that ends leaves the batch.
        """
        ids, positions = given["input_ids"], given.get("position_ids")
        chunk = steps.first.chunk_size
        spans = [(row, 0, ids.shape[1]) for row in range(len(ids))]
        if not ids.is_meta:
            spans = document_spans(
                given.get("attention_mask"), positions, given.get("cu_seq_lens_q"), *ids.shape
            ).tolist()
            spans.sort(key=lambda span: span[1] - span[2])
        cache, found = DynamicCache(config=self.base.config.get_text_config()), dict[int, Tensor]()
        refuse_other_layers(cache)
        # the TTT layers keep their training mode, since their clip depends on it
        others = [m for m in self.lm.modules() if m.training and not isinstance(m, FastWeight)]
        for number in itertools.count():
            reading = [
                (row, start + number * chunk)
                for row, start, stop in spans
                if (stop - start - 1) // chunk > number
            ]
            if not reading:
                break
            rows, firsts = torch.tensor(reading, device=ids.device).T
            columns = firsts[:, None] + torch.arange(chunk, device=ids.device)
            piece = {"input_ids": ids[rows[:, None], columns], CACHE: cache, "use_cache": True}
            if positions is not None:
                piece["position_ids"] = positions.expand_as(ids)[rows[:, None], columns]
            if number and len(reading) < first_stream(cache).batch:
                cache.batch_select_indices(torch.arange(len(reading), device=ids.device))
            with overriding(others, training=False), torch.no_grad():
                tape = steps.read_whole_chunk(piece, cache)[1]
            for index, values in tape.probes.items():
                found.setdefault(index, values.new_zeros(*ids.shape, values.shape[-1]))[
                    rows[:, None], columns
                ] = values
        return found or {
            i: torch.zeros(*ids.shape, features(layer)[1], device=ids.device)
            for i, layer in steps.layers.items()
        }

    def _read_in_pieces(self, given: dict[str, Any], steps: GradientSteps) -> Any:
        """Reads into a cache without a graph, in pieces that end where a chunk of any row ends."""
        cache, keeps = self._cache(given), given.get("use_cache")
        refuse_other_layers(cache)
        with torch.no_grad():
            outputs = [
                self._piece(piece, cache, steps)
                for piece in self._pieces(given, cache, steps.first.chunk_size)
            ]
        whole = outputs[-1]
        whole.last_hidden_state = torch.cat([output.last_hidden_state for output in outputs], dim=1)
        if getattr(whole, "hidden_states", None) is not None:
            whole.hidden_states = tuple(
                torch.cat(parts, dim=1)
                for parts in zip(*(output.hidden_states for output in outputs), strict=True)
            )
        if keeps is False:
            whole[CACHE] = None
        return whole

    def _cache(self, given: dict[str, Any]) -> Cache:
        """Returns the forward's cache, or a new one."""
        cache = cache_in(given)
        return DynamicCache(config=self.base.config.get_text_config()) if cache is None else cache

    def _pieces(self, given: dict[str, Any], cache: Cache, chunk: int) -> Iterator[dict[str, Any]]:
        """Yields the arguments of each piece."""
        ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        if _is_packed(given):
            raise InPlaceTTTError(
                "several documents are packed in a row with a cache; pass use_cache=False for packed rows."
            )
        past = int(cache.get_seq_length())
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

    def _piece(self, piece: dict[str, Any], cache: Cache, steps: GradientSteps) -> Any:
        """Reads a piece, and writes the chunks that it completes."""
        if _is_whole_chunk(piece, steps.streams(cache, len(piece["input_ids"]))):
            return steps.read_whole_chunk(piece, cache)[0]
        cache.activate_past_recording()  # a layer with a window must keep the open chunk's past
        output = steps.call(**piece)
        first = first_stream(cache)
        if first.complete:
            steps.write(piece, cache, first.complete)
        if not any(first.filled):
            stop_recording(cache)
        return output


def _normal(value: Any) -> Any:
    """Returns a copy of a tensor that was made in inference mode, and other values as they are."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _spans(ids: Tensor, mask: Tensor | None, past: int) -> list[Span]:
    """Returns the span of each row's tokens, without padding."""
    batch, length = ids.shape
    if mask is None:
        return [(0, length)] * batch
    rows = ChunkLayout.from_attention_mask(mask[:, past : past + length], chunk_size=1).documents
    return [row[0] if row else (0, 0) for row in rows]


def _borders(spans: list[Span], filled: list[int], chunk: int) -> Iterator[int]:
    """Yields the positions at which a chunk of any row ends."""
    for (start, stop), held in zip(spans, filled, strict=True):
        yield from range(start + chunk - held, stop + 1, chunk)


def _refuse_what_has_no_ids(given: dict[str, Any]) -> None:
    mask = given.get("attention_mask")
    if given.get("input_ids") is None or given.get("inputs_embeds") is not None:
        raise InPlaceTTTError(
            "target='gradient' predicts token ids, but this forward has embeddings; pass input_ids alone."
        )
    if mask is not None and not (isinstance(mask, Tensor) and (mask.dim() == 2 or mask.is_meta)):
        raise InPlaceTTTError(
            "target='gradient' reads rows with a 2-D attention_mask [B, T], or none; pass one of these."
        )
    if given.get("output_attentions"):
        raise InPlaceTTTError(
            "target='gradient' reads in pieces, whose attention weights cannot be joined; leave "
            "output_attentions out."
        )


def _is_packed(given: dict[str, Any]) -> bool:
    """Returns True if rows hold several documents. For rows on the meta device (`plan`) it is True."""
    positions = given.get("position_ids")
    if given.get("cu_seq_lens_q") is not None or given["input_ids"].is_meta:
        return True
    if (
        positions is None
        or positions.dim() != 2
        or given["input_ids"].shape[1] == 1
        or given.get("attention_mask") is not None
    ):
        return False
    return bool(document_starts(positions)[:, 1:].any())


def _is_whole_chunk(piece: dict[str, Any], stream: FastWeightStream) -> bool:
    """Returns True if the piece is one whole chunk of every row, without padding."""
    ids, mask = piece["input_ids"], piece.get("attention_mask")
    if ids.shape != (stream.batch, stream.chunk_size) or any(stream.filled):
        return False
    return mask is None or bool(mask[:, -stream.chunk_size :].all())

"""A session with a converted model: its fast weights and its KV cache; read, generate, save, load, fork."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..checkpoint.fingerprint import fingerprint_of
from ..errors import InPlaceTTTError, shown
from ..families import CACHE
from ..layer.cache import CarriesFastWeight, attach, only_written, plain_class, stop_recording, streams
from ..layer.forward_context import reading_text
from ..layer.prompt_stream import PromptStream, stream_class
from ..surgery import config_of, fast_weights
from . import file as session_file
from .check import check_header, check_session

_READ_AT_ONCE = 1024
_GOES_ON_AS_ONE = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "use_cache": True,
    "cache_implementation": None,
    "assistant_model": None,  # an assisted generation's first step takes no account of what a cache has read
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "use_mtp": False,
}
"""Settings of `model.generate` under which a session is one cache and one sequence of tokens a row."""


class Session:
    """A session with one converted model: its fast weights and, unless left out, its KV cache.

    cache: the transformers cache; it may also be passed to the model by hand, as `cache` (`past_key_values`
        before transformers 5.24),
    and what it then reads belongs into `tokens`.
    tokens: the session's token ids [B, n], no padding; `model.generate` wants all of them.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache | None = None, tokens: Tensor | None = None
    ) -> None:
        self.model = model
        self.cache: Cache = DynamicCache(config=model.config.get_text_config()) if cache is None else cache
        self.tokens = tokens

    @property
    def chunks_written(self) -> int:
        """Chunks written so far, over all sequences (each TTT layer writes every one of them)."""
        return max((sum(stream.written) for stream in streams(self.cache).values()), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the fast-weight states S, all layers and sequences; 0 before the first complete chunk."""
        return sum(s.state.nbytes for s in streams(self.cache).values() if s.state is not None)

    @torch.no_grad()
    def read(
        self, ids: Tensor, *, readings: int = 1, up_to_last: bool = False, progress: bool = False
    ) -> None:
        """Append token ids [B, n] to the session and read what its cache has not seen, some at a time.

        Args:
            ids: token ids [B, n], whole numbers.
            readings: how many times to read the text. After each reading but the last the KV cache is
                dropped, as by `drop_kv_cache`.
            up_to_last: leave the last token for `model.generate`, which reads it.
            progress: show a bar on stderr.

        Raises:
            InPlaceTTTError: if `ids` are not token ids of this model, or the cache has read tokens that the
                session does not know.

        Example:
            >>> session.read(tokenizer(notes, return_tensors="pt").input_ids, readings=4)
        """
        if type(readings) is not int or readings < 1:
            raise InPlaceTTTError(f"readings must be a whole number of at least 1, got {shown(readings)}.")
        for _ in range(readings - 1):
            self.read(ids, progress=progress)
            fresh = self.drop_kv_cache()
            self.cache, self.tokens = fresh.cache, fresh.tokens
        tokens = self._with(ids)
        start, stop = self.cache.get_seq_length(), tokens.shape[1] - up_to_last
        bar = tqdm(
            total=max(stop - start, 0),
            desc="reading",
            unit="tok",
            file=sys.stderr,
            disable=None if progress else True,
        )
        with bar, reading_text():
            while start < stop:
                end = min(start + _READ_AT_ONCE, stop)
                self.model(tokens[:, start:end], **{CACHE: self.cache}, logits_to_keep=1)
                bar.update(end - start)
                start = end
                self.tokens = tokens[:, :end]
        self.tokens = tokens

    def _with(self, ids: Tensor) -> Tensor:
        """The session's tokens and `ids` after them [B, n]."""
        if (
            not isinstance(ids, Tensor)
            or ids.dim() != 2
            or ids.is_floating_point()
            or ids.dtype == torch.bool
        ):
            what = (
                f"{ids.dtype} of shape {list(ids.shape)}"
                if isinstance(ids, Tensor)
                else f"a {type(ids).__name__}"
            )
            raise InPlaceTTTError(f"token ids are a tensor of whole numbers [B, n], got {what}.")
        known = self.model.get_input_embeddings().num_embeddings
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < known:
            raise InPlaceTTTError(
                f"the model knows token ids from 0 to {known - 1}, got {int(ids.min())} to {int(ids.max())}."
            )
        self._refuse_unknown()
        held = {stream.batch for stream in streams(self.cache).values() if not stream.is_empty} | (
            {len(self.tokens)} if self.tokens is not None else set()
        )
        if held and held != {len(ids)}:
            raise InPlaceTTTError(
                f"the session holds {max(held)} sequences, the new tokens have {len(ids)} rows; give one "
                "row for each."
            )
        if self.tokens is None:
            return ids.long()
        return torch.cat([self.tokens, ids.long().to(self.tokens.device)], dim=1)

    def _refuse_unknown(self) -> None:
        """Whatever comes next would be read at another place than its own."""
        for stream in streams(self.cache).values():
            stream.check_holds_state()
        known, read = 0 if self.tokens is None else self.tokens.shape[1], self.cache.get_seq_length()
        if read > known:
            raise InPlaceTTTError(
                f"the session's cache has read {read} tokens and the session knows {known}: it was passed "
                "to the model by hand, or a call "
                "was interrupted; append what was read to `tokens`, or go on with a fork or a file from "
                "before."
            )

    @torch.no_grad()
    def write_prompt(self, ids: Tensor, *, progress: bool = False) -> None:
        """Append token ids [B, n], with which the prompt ends, read them, and write the prompt
        (`prompt_write` of the config).

        Once in a session. Its last token is left, to be read again with what was written. Raises
        InPlaceTTTError where the config has no `prompt_write`, and for prompts of less than three tokens.
        """
        if config_of(self.model).prompt_write is None:
            raise InPlaceTTTError(
                "this model's config has no prompt_write, so that nothing is written at a prompt's end; "
                "use read."
            )
        if self._with(ids).shape[1] < 3 or ids.shape[1] == 0:
            raise InPlaceTTTError("a prompt of less than three tokens has nothing to write; give more of it.")
        if self.chunks_written:
            raise InPlaceTTTError(
                "this session's prompt is written already; fork the session before its end, or start a new "
                "one."
            )
        self.read(ids[:, :-1], progress=progress)
        self.cache.activate_past_recording()  # or a layer with a window could not take its last token back
        try:
            self.read(ids[:, -1:])
            write_prompt(self.model, self.cache)
        finally:
            stop_recording(self.cache)

    def generate(self, ids: Tensor, *, progress: bool = False, **kwargs: Any) -> Tensor:
        """Read token ids [B, n], then go on: the new tokens [B, m], which join the session. kwargs: as for
        `model.generate`, no padding.

        Where the config has `prompt_write` and nothing is written yet, the prompt ends here and is written.
        In a batch, a row that ends before the others is padded by `model.generate`, and what it pads is read
        as text.
        """
        settings = kwargs.get("generation_config") or self.model.generation_config
        for name, wanted in _GOES_ON_AS_ONE.items():
            if (asked := kwargs.get(name, getattr(settings, name, None))) not in (None, wanted):
                raise InPlaceTTTError(
                    "a session goes on as one sequence of tokens a row, in its own cache; leave "
                    f"{name}={shown(asked)} out of the "
                    "arguments and of generation_config.json, or use model.generate."
                )
        if (mask := kwargs.pop("attention_mask", None)) is not None and not bool(torch.as_tensor(mask).all()):
            raise InPlaceTTTError(
                "a session's rows have no padding; give token ids of one length, or a session to each row."
            )
        self._with(ids)
        if self._awaits_write(ids):
            self.write_prompt(ids, progress=progress)
        else:
            self.read(ids, up_to_last=True, progress=progress)
        assert self.tokens is not None
        known = self.tokens.shape[1]
        if self.cache.get_seq_length() >= known:
            raise InPlaceTTTError(
                "the session has read all its tokens, and generation starts from one that it has not; give "
                "it at least one more."
            )
        mask = torch.ones_like(self.tokens)
        # the token that is left of what was given, also where it is the only one
        with reading_text(forwards=1):
            self.tokens = self.model.generate(
                self.tokens, attention_mask=mask, **{CACHE: self.cache}, **kwargs
            )
        return self.tokens[:, known:]

    def _awaits_write(self, ids: Tensor) -> bool:
        """Whether a prompt that ends with `ids` is to be written, and long enough for it."""
        known = 0 if self.tokens is None else self.tokens.shape[1]
        wanted = config_of(self.model).prompt_write is not None and not self.chunks_written
        return wanted and ids.shape[1] > 0 and known + ids.shape[1] > 2

    def fork(self) -> Session:
        """An independent copy: what one branch reads, the other does not know."""
        for stream in streams(self.cache).values():
            stream.check_holds_state()
        return Session(
            self.model, copy.deepcopy(self.cache), None if self.tokens is None else self.tokens.clone()
        )

    def drop_kv_cache(self) -> Session:
        """A state with the same fast weights and an empty KV cache: only what was written is left."""
        fresh = Session(self.model)
        only_written(self.cache, fresh.cache)
        return fresh

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session to one safetensors file, with the model's fingerprint and a checksum; replaces
        the file in one step."""
        if self.tokens is not None:  # a session without them keeps what a cache has read by hand
            self._refuse_unknown()
        tensors: dict[str, Tensor] = {}
        attention: dict[int, dict[str, int | None]] = {}
        again = max((stream.asks_again for stream in streams(self.cache).values()), default=0)
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, CarriesFastWeight):
                tensors |= {
                    f"{index}.fast.{name}": tensor for name, tensor in layer.fast_weight.tensors().items()
                }
            if getattr(layer, "is_initialized", False) and layer.get_seq_length() > 0:
                if plain_class(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                    raise InPlaceTTTError(
                        f"a {plain_class(layer).__name__} cannot be saved; use a DynamicCache, or save "
                        "state.drop_kv_cache()."
                    )
                window = getattr(layer, "sliding_window", None)
                # more is there while past is recorded
                kept = slice(None) if window is None else slice(-window + 1 - again, None)
                tensors |= {
                    f"{index}.keys": layer.keys[:, :, kept],
                    f"{index}.values": layer.values[:, :, kept],
                }
                attention[index] = {"length": layer.get_seq_length(), "window": window}
        if self.tokens is not None:
            tensors["tokens"] = self.tokens.contiguous()
        session_file.write(
            path,
            tensors,
            config=config_of(self.model).to_dict(),
            fingerprint=fingerprint_of(self.model),
            attention={str(index): kept for index, kept in attention.items()},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: PreTrainedModel) -> Session:
        """Read a session saved by `save`; refuses what is damaged, and the session of another model or of
        another TTT config."""
        header, tensors = session_file.read(path)
        config = config_of(model)
        check_header(path, header, config, fingerprint_of(model))
        check_session(path, header, tensors, model)
        state = cls(model)
        state.tokens = tensors.pop("tokens", None)
        if state.tokens is not None:
            state.tokens = state.tokens.to(model.device)
        for name, saved in header.attention.items():
            index = int(name)
            layer = DynamicLayer() if saved.window is None else DynamicSlidingWindowLayer(saved.window)
            state.cache.layers[index] = layer
            keys, values = (
                tensors[f"{index}.{name}"].to(model.device, model.dtype) for name in ("keys", "values")
            )
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if saved.window is not None:
                layer.cumulative_length = saved.length
                layer.record_past = keys.shape[2] >= saved.window
        for index in fast_weights(model):
            prefix = f"{index}.fast."
            held = {
                name.removeprefix(prefix): t.to(model.device)
                for name, t in tensors.items()
                if name.startswith(prefix)
            }
            if held:
                attach(state.cache, index, stream_class(config).restore(held, config, model.dtype))
        return state


def write_prompt(model: PreTrainedModel, cache: Cache) -> None:
    """Write the prompt that a cache has read, and take its last token back, to be read again with what was
    written.

    The cache must have recorded its past since that token at the latest (`cache.activate_past_recording()`).
    """
    layers = fast_weights(model)
    for index, stream in streams(cache).items():
        assert isinstance(stream, PromptStream)
        stream.write(layers[index])
    cache.crop(-1)
    stop_recording(cache)

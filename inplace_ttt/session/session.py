"""A session with a converted model: its fast weights and its KV cache."""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from ..checkpoint.fingerprint import fingerprint_of
from ..errors import InPlaceTTTError, shown
from ..families import CACHE
from ..layer.cache import only_written, stop_recording, streams
from ..layer.forward_context import reading_text
from ..surgery import config_of
from . import file as session_file
from .check import check_header, check_session
from .contents import contents_of, fill
from .exports import WeightExports
from .generation import check_settings
from .merging import add_writes
from .prompt import write_prompt
from .tokens import appended, refuse_unknown

_READ_AT_ONCE = 1024


class Session(WeightExports):
    """Keeps the fast weights and, unless dropped, the KV cache of B sequences (paper §3.4, Algorithm 1).

    The state does not depend on how a text is split into calls of `read`, up to rounding.

    Args:
        model: a converted model.
        cache: the transformers cache; a new one if None. You can also pass it to the model yourself, as
            `cache` (`past_key_values` before transformers 5.24). Then append the tokens read to `tokens`.
        tokens: the session's token ids [B, n], int64, without padding; None before the first token.
            `model.generate` needs all of them.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, Session, convert
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> ids = torch.randint(32000, (1, 40))  # in place of a tokenizer's
        >>> session = Session(model)
        >>> session.read(ids)
        >>> session.chunks_written, session.state_bytes
        (2, 32768)
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache | None = None, tokens: Tensor | None = None
    ) -> None:
        self.model = model
        self.cache: Cache = DynamicCache(config=model.config.get_text_config()) if cache is None else cache
        self.tokens = tokens

    @property
    def batch(self) -> int:
        """B, the number of sequences; 0 before the first token."""
        return next((stream.batch for stream in streams(self.cache).values()), 0)

    @property
    def chunks_written(self) -> int:
        """The number of chunks written so far, over all sequences. Each TTT layer writes every chunk."""
        return max((sum(stream.written) for stream in streams(self.cache).values()), default=0)

    @property
    def unwritten(self) -> int:
        """The number of tokens in the longest unfinished chunk. These tokens are not written yet."""
        return max((max(stream.filled, default=0) for stream in streams(self.cache).values()), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states S, over all layers and sequences; 0 before the first complete chunk."""
        return sum(s.state.nbytes for s in streams(self.cache).values() if s.state is not None)

    @torch.no_grad()
    def read(
        self, ids: Tensor, *, readings: int = 1, up_to_last: bool = False, progress: bool = False
    ) -> None:
        """Appends token ids to the session, and reads the tokens that its cache has not read.

        The tokens are read 1,024 at a time.

        Args:
            ids: token ids [B, n], integers.
            readings: how many times to read the text. After each reading but the last the KV cache is
                dropped, as by `drop_kv_cache`.
            up_to_last: leave the last token for `model.generate`, which reads it.
            progress: show a bar on stderr.

        Raises:
            InPlaceTTTError: if `ids` are not token ids of this model, or their number of rows differs from
                the session's. Also if `readings` is below 1, or if the cache has read tokens that are missing
                in `tokens`.

        Examples:
            >>> several = Session(model)
            >>> several.read(ids, readings=4)
            >>> several.chunks_written
            10
        """
        if type(readings) is not int or readings < 1:
            raise InPlaceTTTError(f"readings must be a whole number of at least 1, got {shown(readings)}.")
        for _ in range(readings - 1):
            self.read(ids, progress=progress)
            fresh = self.drop_kv_cache()
            self.cache, self.tokens = fresh.cache, fresh.tokens
        tokens = appended(ids, self.model, self.cache, self.tokens)
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

    @torch.no_grad()
    def write_prompt(self, ids: Tensor, *, progress: bool = False) -> None:
        """Reads the end of the prompt, then writes the prompt (`prompt_write` of the config).

        Call it once per session. `generate` reads the prompt's last token again, with the written weights.

        Args:
            ids: token ids [B, n], the end of the prompt.
            progress: show a bar on stderr.

        Raises:
            InPlaceTTTError: if the config lacks `prompt_write`, the prompt has less than three tokens, or the
                session's prompt is already written. Also in the cases of `read`.

        Examples:
            >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
            >>> config = InPlaceTTTConfig.preset("ttt_ntp", chunk_size=16)
            >>> prompted = Session(convert(AutoModelForCausalLM.from_config(small), config))
            >>> prompted.write_prompt(ids)
            >>> prompted.generate(ids[:, :0], max_new_tokens=3, do_sample=False).shape
            torch.Size([1, 3])
        """
        if config_of(self.model).prompt_write is None:
            raise InPlaceTTTError(
                "this model's config lacks prompt_write, so nothing is written at a prompt's end; use read."
            )
        if appended(ids, self.model, self.cache, self.tokens).shape[1] < 3 or ids.shape[1] == 0:
            raise InPlaceTTTError(
                "a prompt of less than three tokens has nothing to write; give a longer prompt."
            )
        if self.chunks_written:
            raise InPlaceTTTError(
                "this session's prompt is written already; fork a session before its prompt ends, or start a "
                "new session."
            )
        self.read(ids[:, :-1], progress=progress)
        # without the recording, a layer with an attention window could not drop its last token again
        self.cache.activate_past_recording()
        try:
            self.read(ids[:, -1:])
            write_prompt(self.model, self.cache)
        finally:
            stop_recording(self.cache)

    def generate(self, ids: Tensor, *, progress: bool = False, **kwargs: Any) -> Tensor:
        """Reads token ids, then generates. The new tokens become part of the session.

        If the config has `prompt_write` and nothing is written yet, `ids` end the prompt, and it is written.
        In a batch, `model.generate` pads a row that ends before the others, and reads this padding as text.

        Args:
            ids: token ids [B, n].
            progress: show a bar on stderr.
            kwargs: arguments for `model.generate`, without padding.

        Returns:
            The new token ids [B, m], int64.

        Raises:
            InPlaceTTTError: if `ids` do not fit the session, a setting of `model.generate` does not work with
                a session, or no token is left to generate from.

        Examples:
            >>> session.generate(ids[:, :8], max_new_tokens=3, do_sample=False).shape
            torch.Size([1, 3])
        """
        check_settings(self.model, kwargs)
        appended(ids, self.model, self.cache, self.tokens)
        if self._awaits_write(ids):
            self.write_prompt(ids, progress=progress)
        else:
            self.read(ids, up_to_last=True, progress=progress)
        assert self.tokens is not None
        known = self.tokens.shape[1]
        if self.cache.get_seq_length() >= known:
            raise InPlaceTTTError(
                "the session has read all its tokens, but generation starts from an unread token; give at "
                "least one token more."
            )
        mask = torch.ones_like(self.tokens)
        # `generate` itself reads the last given token, even if that is the only one
        with reading_text(forwards=1):
            self.tokens = self.model.generate(
                self.tokens, attention_mask=mask, **{CACHE: self.cache}, **kwargs
            )
        return self.tokens[:, known:]

    def _awaits_write(self, ids: Tensor) -> bool:
        """Returns True if a prompt that ends with `ids` must be written and is long enough."""
        known = 0 if self.tokens is None else self.tokens.shape[1]
        wanted = config_of(self.model).prompt_write is not None and not self.chunks_written
        return wanted and ids.shape[1] > 0 and known + ids.shape[1] > 2

    def fork(self) -> Session:
        """Copies the session. The copy and the original then read independently.

        Returns:
            The copy, with the same model.

        Raises:
            InPlaceTTTError: if a forward with gradients filled the cache. Such a forward keeps no state.

        Examples:
            >>> branch = session.fork()
            >>> branch.read(ids)
            >>> branch.chunks_written > session.chunks_written
            True
        """
        for stream in streams(self.cache).values():
            stream.check_holds_state()
        return Session(
            self.model, copy.deepcopy(self.cache), None if self.tokens is None else self.tokens.clone()
        )

    def drop_kv_cache(self) -> Session:
        """Copies the fast weights and the unfinished chunk to a new session, without KV cache and tokens.

        Returns:
            The new session, whose positions start at 0. Use it in place of this one.

        Examples:
            >>> fast_weights_only = session.drop_kv_cache()
            >>> fast_weights_only.cache.get_seq_length(), fast_weights_only.state_bytes
            (0, 32768)
        """
        fresh = Session(self.model)
        only_written(self.cache, fresh.cache)
        return fresh

    def merge(self, *others: Session) -> Session:
        """Adds up the writes of several sessions in a new session.

        A state is a sum over chunks, so states can be added. The sum resembles one session that read all
        texts, with its KV cache dropped after each text. It is not equal: in one session, the writes of the
        first text also change the keys and targets of the second. The new session has no KV cache, no tokens
        and no unfinished chunk.

        Args:
            others: sessions of the same model, with as many sequences as this one.

        Returns:
            A new session, whose positions start at 0.

        Raises:
            InPlaceTTTError: if the config has `prompt_write`, whose write cannot be added. Also if a session
                has another model or another number of sequences.

        Examples:
            >>> both = session.merge(session)
            >>> both.chunks_written == 2 * session.chunks_written
            True
        """
        if any(other.model is not self.model for other in others):
            raise InPlaceTTTError("sessions of two models cannot be merged; load both into one model.")
        fresh = self.drop_kv_cache()
        for other in others:
            add_writes(fresh.cache, other.cache, config_of(self.model))
        return fresh

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session to one safetensors file, replacing it in one step.

        The file holds the model's fingerprint and a checksum.

        Args:
            path: the file to write.

        Raises:
            InPlaceTTTError: if the cache has read tokens that are missing in `tokens`, or its class cannot be
                saved. Also if a prompt is read but not yet written (`prompt_write`).

        Examples:
            >>> session.save("small.state")
        """
        if self.tokens is not None:  # without tokens, a cache that was used by hand is saved as it is
            refuse_unknown(self.cache, self.tokens)
        tensors, attention = contents_of(self.cache)
        if self.tokens is not None:
            tensors["tokens"] = self.tokens.contiguous()
        session_file.write(
            path,
            tensors,
            config=config_of(self.model).to_dict(),
            fingerprint=fingerprint_of(self.model),
            attention=attention,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: PreTrainedModel) -> Session:
        """Reads a session saved by `save`.

        Args:
            path: the session file.
            model: the model that wrote it.

        Returns:
            The session, on the model's device.

        Raises:
            InPlaceTTTError: if the file is damaged, or was saved with another model or another TTT config.

        Examples:
            >>> session.save("small.state")
            >>> Session.load("small.state", model).tokens.equal(session.tokens)
            True
        """
        header, tensors = session_file.read(path)
        check_header(path, header, config_of(model), fingerprint_of(model))
        check_session(path, header, tensors, model)
        state = cls(model)
        state.tokens = tensors.pop("tokens", None)
        if state.tokens is not None:
            state.tokens = state.tokens.to(model.device)
        fill(state.cache, model, header, tensors)
        return state

"""One layer's fast weight, read in pieces. One function serves prefill, chunked prefill and decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..layout import Span
from ..ops import state_dtype
from ..rules import PAPER_RULE, Rule
from .buffers import OpenChunks, State
from .rows import ChunkRows, Row, StreamedLayer

_UNDO_REACH = 128
"""Number of later tokens from which a written chunk can no longer be cropped.

The limit does not apply while one forward reads all these tokens.
"""


class FastWeightStream(ChunkRows):
    """The stream of one layer. Per sequence it holds the state S, the open chunk, and the undo of a write.

    Args:
        batch: B, number of sequences.
        chunk_size: tokens per chunk.
        update_on_decode: True if generated tokens are written.
        rule: the update rule.
    """

    def __init__(
        self, batch: int, chunk_size: int, update_on_decode: bool = True, rule: Rule = PAPER_RULE
    ) -> None:
        super().__init__(batch, chunk_size, rule)
        self.update_on_decode, self._abandoned = update_on_decode, False
        self.decoder: Any = None  # a `graph_ops.Decoder`, once the stream was used outside of graphs

    @classmethod
    def of(cls, config: InPlaceTTTConfig, batch: int) -> FastWeightStream:
        """Returns an empty stream of a layer with this config."""
        return cls(batch, config.chunk_size, config.update_on_decode, config.rule)

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def state(self) -> Tensor | None:
        """The states, in float32, or in float64 for float64 models. None before the first write.

        They are S [B, d, h] without η. Under the ridge rule they are the sums [B, d + r, r], and with
        `prompt_write` the change η'ΔW.
        """
        return None if self._state is None else self._state.value

    @property
    def filled(self) -> list[int]:
        """Number of tokens in the open chunk, per row."""
        return [row.filled for row in self.rows]

    @property
    def written(self) -> list[int]:
        """Number of chunks written, per row."""
        return [row.written for row in self.rows]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens received, per row."""
        return [row.written * self.chunk_size + row.filled for row in self.rows]

    @property
    def is_empty(self) -> bool:
        """True before the first token. Then a stream for another number of rows may replace this one."""
        return not any(self.tokens) and not self._abandoned

    def read_matrix(self, row: int, layer: StreamedLayer) -> Tensor:
        """Returns η times the matrix [d, r] that a row's keys are multiplied by, after the first write."""
        assert self._state is not None
        return layer.readout(self._state.value[row]) * layer.eta

    @torch.no_grad()
    def advance(
        self,
        out: Tensor,
        z: Tensor,
        x: Tensor,
        spans: list[Span],
        layer: StreamedLayer,
        *,
        generated: bool = False,
    ) -> Tensor:
        """Adds the reads to `out` in place, and the new tokens to the open chunks.

        A token reads the chunks that were complete before it. A chunk is written after its last token is
        read.

        Args:
            out: outputs without fast weights [B, T, d].
            z: keys [B, T, r].
            x: target source [B, T, d].
            spans: for each row, the span of its tokens without padding.
            layer: the layer that reads and writes.
            generated: True if the model generated these tokens. They are written only with
                `update_on_decode`.

        Returns:
            `out`.

        Raises:
            InPlaceTTTError: if the batch has another number of rows than the cache, or the cache was filled
                with gradients on.
        """
        if len(spans) != self.batch:
            raise InPlaceTTTError(
                f"the cache holds {self.batch} sequences, but the batch has {len(spans)}; start a new cache."
            )
        self.check_holds_state()
        self._thaw()
        self._drop_old_undos()
        if generated and not self.update_on_decode and any(self.tokens):
            self._read(out, z, layer)
            self.skip()
            return out
        for row, (start, stop) in zip(self.rows, spans, strict=True):
            unbroken = stop - start + (row.unbroken if start == 0 else 0)
            row.unbroken = unbroken if stop == z.shape[1] else 0
        # without `update_on_decode` every crop is refused
        self._advance(out, z, x, spans, layer, undoable=self.update_on_decode)
        return out

    def _drop_old_undos(self) -> None:
        # An undo needs as much memory as the state. Assisted decoding rejects guesses within a few tokens.
        for row in self.rows:
            row.undo = row.undo if row.filled <= _UNDO_REACH and row.filled < row.unbroken else None

    def _thaw(self) -> None:
        """Copies tensors made under torch.inference_mode(), which cannot be changed outside of it."""
        if not torch.is_inference_mode_enabled():
            self._open.thaw()
            if self._state is not None:
                self._state.thaw()

    def skip(self) -> None:
        """Records tokens in the cache that this stream did not receive. No crop can go back beyond them."""
        for row in self.rows:
            row.unbroken = 0

    def abandon(self) -> None:
        """Records a forward with gradients, which reads whole documents and keeps no state in this stream.

        Raises:
            InPlaceTTTError: if the stream has received tokens, or already had such a forward.
        """
        if any(self.tokens) or self._abandoned:
            raise InPlaceTTTError(
                "gradients do not flow through a cache that holds a sequence; pass use_cache=False or use "
                "torch.no_grad()."
            )
        self._abandoned = True

    def check_holds_state(self) -> None:
        """Raises InPlaceTTTError if a forward with gradients has filled the cache (see `abandon`)."""
        if self._abandoned:
            raise InPlaceTTTError(
                "this cache was filled with gradients on, which keeps no state; fill it under "
                "torch.no_grad()."
            )

    def crop(self, tokens: int) -> None:
        """Removes the last `tokens` tokens of every row, as if they had never been read."""
        if tokens == 0 or self._abandoned:
            return
        self.check_crop(tokens)
        self._thaw()
        back = [min(tokens, held) for held in self.tokens]
        if back == self.tokens:
            self.reset()
            return
        for index, (row, held, n) in enumerate(zip(self.rows, self.tokens, back, strict=True)):
            if n == held:
                self.rows[index] = Row()
                if self._state is not None:
                    self._state.put(index, None)
                continue
            if n > row.filled:
                self._take_back(index)
            row.filled -= n
            row.unbroken -= n

    def check_crop(self, tokens: int) -> None:
        """Raises InPlaceTTTError if `crop` cannot remove so many tokens."""
        if tokens == 0 or self._abandoned:
            return
        if not self.update_on_decode:
            raise InPlaceTTTError(
                "with update_on_decode off, tokens cannot be taken back, since generated tokens were not "
                "written and cannot be distinguished from the others; generate without an assistant and "
                "without prompt lookup."
            )
        for row, held in zip(self.rows, self.tokens, strict=True):
            n = min(tokens, held)
            if tokens > row.unbroken < held:
                raise InPlaceTTTError(
                    f"the last {tokens} tokens of this cache include padding, or tokens read with TTT off, "
                    "so they cannot "
                    "be taken back; pad at the left of the first forward only."
                )
            if row.filled < n < held and not (row.undo is not None and n <= row.filled + self.chunk_size):
                raise InPlaceTTTError(
                    f"the last {tokens} tokens reach behind a chunk that is written for good; only the last "
                    "chunk of "
                    f"{self.chunk_size} can be taken back (fork the session before reading tokens that you "
                    "may take back)."
                )

    def _take_back(self, index: int) -> None:
        """Undoes a row's last write, so its chunk is the open chunk again.

        `filled` then also counts the tokens read since, but their rows of Z and X are dropped.
        """
        row = self.rows[index]
        assert self._state is not None and row.undo is not None
        self._state.put(index, row.undo.state)
        self._open.put(index, 0, row.undo.z, row.undo.x)
        row.filled, row.written, row.undo = row.filled + self.chunk_size, row.written - 1, None

    def reset(self) -> None:
        """Empties the stream. The next tokens read W0 alone."""
        self.__init__(self.batch, self.chunk_size, self.update_on_decode, self.rule)  # type: ignore[misc]

    def select(self, rows: list[int]) -> None:
        """Keeps the given rows in this order, with repeats (beam search, batch select, repeat).

        Args:
            rows: indices of rows.
        """
        if rows == list(range(self.batch)):
            return
        self._open = self._open.select(rows)
        self._state = self._state and self._state.select(rows)
        self.rows = [dataclasses.replace(self.rows[row]) for row in rows]

    def lend(self, sources: list[int]) -> None:
        """Sets the state of each row r to that of row sources[r]. Open chunks and counts do not change."""
        self._state = self._state and self._state.select(sources)

    def add_writes(self, other: FastWeightStream) -> None:
        """Adds the states of another stream of this layer, row by row. Both open chunks are left out.

        A state is a sum over chunks, so the result is the state after the chunks of both streams.
        """
        if other.state is not None:
            value = other.state if self.state is None else self.state + other.state
            self._state = State(value, self.rule)
        counts = [row.written + theirs.written for row, theirs in zip(self.rows, other.rows, strict=True)]
        self.rows = [Row(written=written) for written in counts]
        self._open = OpenChunks(self.batch, self.chunk_size)

    @property
    def asks_again(self) -> int:
        """Number of last tokens that a write may read again. The KV cache of these tokens must be kept."""
        return 0

    def forget_attention(self) -> None:
        """Prepares the stream for a new KV cache, without the tokens read so far."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the stream's contents as tensors to save; `restore` is the inverse."""
        self.check_holds_state()
        held = {"counts": torch.tensor([self.filled, self.written, [row.unbroken for row in self.rows]])}
        if self.state is not None:
            held["state"] = self.state
        if (open_rows := max(self.filled, default=0)) and self._open.held:
            held |= {name: buffer[:, :open_rows] for name, buffer in zip("zx", self._open.held, strict=True)}
        return {name: tensor.contiguous() for name, tensor in held.items()}

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: InPlaceTTTConfig, dtype: torch.dtype
    ) -> FastWeightStream:
        """Returns the stream of saved tensors.

        Args:
            tensors: from `tensors`.
            config: the model's config.
            dtype: the dtype in which the model computes.
        """
        counts = tensors["counts"].tolist()
        stream = cls.of(config, len(counts[0]))
        stream.rows = [Row(*row) for row in zip(*counts, strict=True)]
        if "z" in tensors:
            stream._open.held = tensors["z"].to(dtype), tensors["x"].to(dtype)
        if "state" in tensors:
            stream._state = State(tensors["state"].to(state_dtype(dtype)), config.rule)
        return stream

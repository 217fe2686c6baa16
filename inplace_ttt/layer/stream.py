"""One layer's fast weight while a sequence streams in: prefill, chunked prefill and token by token are one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InPlaceTTTError
from ..layout import ChunkLayout, Span
from ..ops import state_dtype

_UNDO_REACH = 128
"""Tokens after which a written chunk can no longer be taken back, unless one forward read them all."""


class Writer(Protocol):
    """What a stream asks of its layer."""

    @property
    def chunk_size(self) -> int: ...
    @property
    def eta(self) -> float: ...
    @property
    def decode_updates(self) -> bool: ...
    def write(self, z: Tensor, x: Tensor, state: Tensor | None) -> Tensor:
        """The state [d, h] after one complete chunk: keys [C, h], target source [C, d], and the state before (None: zero)."""

    def read_and_write(self, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """η Z Sᵀ [B, T, d] and the states [B, d, h] after complete chunks: keys [B, T, h], target source [B, T, d]; as `write`."""


@dataclass
class _Undo:
    """A row as it was before its last chunk was written."""

    state: Tensor | None
    z: Tensor
    x: Tensor


class FastWeightStream:
    """State S, the open chunk's rows, and what it takes to step back; one entry for each sequence of the batch.

    state: [B, d, h] float32, without η, or None before the first complete chunk.
    filled, written: for each row, tokens in the open chunk and chunks written.
    """

    def __init__(self, batch: int, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.state: Tensor | None = None
        self.z: Tensor | None = None  # [B, room, h], the open chunk's keys
        self.x: Tensor | None = None  # [B, room, d], its target source
        self.filled = [0] * batch
        self.written = [0] * batch
        self._reader: Tensor | None = None  # the state in the model's dtype
        self._undo: dict[int, _Undo] = {}
        self._unbroken = [0] * batch  # for each row, tokens since padding, or since tokens that it did not take in
        self._decode_updates = True
        self._abandoned = False

    @property
    def batch(self) -> int:
        return len(self.filled)

    @property
    def is_empty(self) -> bool:
        """Whether no token has been read, so that a stream for another batch may take this one's place."""
        return not any(self.tokens) and not self._abandoned

    @property
    def tokens(self) -> list[int]:
        """Tokens taken in, for each row."""
        return [w * self.chunk_size + f for w, f in zip(self.written, self.filled, strict=True)]

    @torch.no_grad()
    def advance(self, out: Tensor, z: Tensor, x: Tensor, spans: list[Span], writer: Writer) -> Tensor:
        """Add η Z Sᵀ to `out` [B, T, d] in place and take the rows' tokens in; z [B, T, h], x [B, T, d].

        spans: the real tokens of each row. A token reads the chunks completed before it; a chunk is written when its
        last token has been read.
        """
        if len(spans) != self.batch:
            raise InPlaceTTTError(f"the cache holds {self.batch} sequences, the batch has {len(spans)}; start a new cache.")
        self.check_holds_memory()
        self._thaw()
        # An undo costs as much as the state. Guesses of assisted decoding come back within a few tokens.
        self._undo = {row: undo for row, undo in self._undo.items() if self.filled[row] <= _UNDO_REACH}
        self._decode_updates = writer.decode_updates
        if z.shape[1] == 1 and not writer.decode_updates and any(self.tokens):
            self._read(out, z, writer.eta)
            self.skip()
            return out
        for row, (start, stop) in enumerate(spans):
            unbroken = stop - start + (self._unbroken[row] if start == 0 else 0)
            self._unbroken[row] = unbroken if stop == z.shape[1] else 0
        fits = all(filled + stop - start <= self.chunk_size for filled, (start, stop) in zip(self.filled, spans, strict=True))
        if fits:
            self._read(out, z, writer.eta)
            for row, (start, stop) in enumerate(spans):
                if start < stop:
                    self._take(row, z[row, start:stop], x[row, start:stop], writer, undoable=True)
            return out
        # the open chunks, then whole chunks together, then each row's last whole chunk, which may be taken back, and the rest
        whole = []
        for row, (start, stop) in enumerate(spans):
            opened = min(start + -self.filled[row] % self.chunk_size, stop)
            self._take_span(out, z, x, row, (start, opened), stop, writer)
            whole.append((opened, opened + max((stop - opened) // self.chunk_size - 1, 0) * self.chunk_size))
        if any(start < stop for start, stop in whole):
            self._take_whole(out, z, x, whole, writer)
        for row, ((_, start), (_, stop)) in enumerate(zip(whole, spans, strict=True)):
            self._take_span(out, z, x, row, (start, stop), stop, writer)
        return out

    def _take_span(self, out: Tensor, z: Tensor, x: Tensor, row: int, span: Span, last: int, writer: Writer) -> None:
        """Read and take in a row's span, one chunk after the other; the row's tokens end at `last`."""
        start, stop = span
        while start < stop:
            end = min(start + self.chunk_size - self.filled[row], stop)
            self._read(out[row : row + 1, start:end], z[row : row + 1, start:end], writer.eta, row)
            self._take(row, z[row, start:end], x[row, start:end], writer, undoable=last - end < self.chunk_size)
            start = end

    def _take_whole(self, out: Tensor, z: Tensor, x: Tensor, spans: list[Span], writer: Writer) -> None:
        """Read and take in spans of whole chunks, all rows at once; none can be taken back."""
        documents = tuple((span,) if span[0] < span[1] else () for span in spans)
        layout = ChunkLayout(documents, z.shape[1], self.chunk_size)
        read, self.state = writer.read_and_write(z, x, layout, self.state)
        out += read.to(out.dtype)
        self._reader = self.state if self.state.dtype == z.dtype else self.state.to(z.dtype)
        self.written = [count + (stop - start) // self.chunk_size for count, (start, stop) in zip(self.written, spans, strict=True)]

    def skip(self) -> None:
        """Note tokens in the cache that were not taken in; a crop cannot step over them."""
        self._unbroken = [0] * self.batch

    def abandon(self) -> None:
        """Note a forward with gradients, which reads whole documents and leaves no memory here to go on from."""
        if any(self.tokens) or self._abandoned:
            raise InPlaceTTTError(
                "gradients do not flow through a cache that holds a sequence; pass use_cache=False or use torch.no_grad()."
            )
        self._abandoned = True

    def _read(self, out: Tensor, z: Tensor, eta: float, row: int | None = None) -> None:
        if self._reader is None:
            return
        if self._reader.dtype != out.dtype:  # autocast came or went
            assert self.state is not None
            self._reader = self.state if self.state.dtype == out.dtype else self.state.to(out.dtype)
        state = self._reader if row is None else self._reader[row : row + 1]
        out.baddbmm_(z.to(out.dtype), state.mT, alpha=eta)

    def _take(self, row: int, z: Tensor, x: Tensor, writer: Writer, undoable: bool) -> None:
        """Take tokens of one row into its open chunk, [n, h] and [n, d]; write the chunk if they complete it."""
        before = self.filled[row]
        if before + len(z) < self.chunk_size:
            self._keep(row, z, x)
            return
        if before:
            assert self.z is not None and self.x is not None
            z = torch.cat([self.z[row, :before], z])
            x = torch.cat([self.x[row, :before], x])
        before_write = None if self.state is None else self.state[row]
        after = writer.write(z, x, before_write)
        if self.state is None:
            self.state = after.new_zeros(self.batch, *after.shape)
            self._reader = self.state if self.state.dtype == z.dtype else self.state.to(z.dtype)
        assert self._reader is not None
        if undoable:
            self._undo[row] = _Undo(self.state[row].clone() if self.written[row] else None, z.clone(), x.clone())
        self.state[row] = after
        self._refresh(row)
        self.filled[row] = 0
        self.written[row] += 1

    def _thaw(self) -> None:
        """What was made under torch.inference_mode() cannot be changed outside of it; copy it once."""
        if torch.is_inference_mode_enabled():
            return
        shared = self._reader is self.state
        for name in ("state", "z", "x", "_reader"):
            held = getattr(self, name)
            if held is not None and held.is_inference():
                setattr(self, name, held.clone())
        if shared:
            self._reader = self.state

    def _refresh(self, row: int) -> None:
        if self._reader is not self.state and self._reader is not None and self.state is not None:
            self._reader[row] = self.state[row]

    def _keep(self, row: int, z: Tensor, x: Tensor) -> None:
        first, last = self.filled[row], self.filled[row] + len(z)
        self.z, self.x = self._with_room(self.z, z, last), self._with_room(self.x, x, last)
        self.z[row, first:last] = z
        self.x[row, first:last] = x
        self.filled[row] = last

    def _with_room(self, buffer: Tensor | None, like: Tensor, rows: int) -> Tensor:
        if buffer is not None and buffer.shape[1] >= rows:
            return buffer
        room = min(self.chunk_size, max(64, 1 << (rows - 1).bit_length()))
        grown = like.new_zeros(self.batch, room, like.shape[-1])
        if buffer is not None:
            grown[:, : buffer.shape[1]] = buffer
        return grown

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every row, as if they had never been read."""
        if tokens == 0 or self._abandoned:
            return
        if not self._decode_updates:
            raise InPlaceTTTError(
                "with decode_updates off, tokens cannot be taken back: generated ones were not written, and nothing tells "
                "them from the others; generate without an assistant and without prompt lookup."
            )
        self._thaw()
        back = [min(tokens, held) for held in self.tokens]
        for row, (held, n) in enumerate(zip(self.tokens, back, strict=True)):
            if tokens > self._unbroken[row] < held:
                raise InPlaceTTTError(
                    f"the last {tokens} tokens of this cache include padding, or tokens read with TTT off, so that they cannot "
                    "be taken back; pad at the left of the first forward only."
                )
            if n > self.filled[row] and n < held and not (row in self._undo and n <= self.filled[row] + self.chunk_size):
                raise InPlaceTTTError(
                    f"the last {tokens} tokens reach behind a chunk that is written for good; only the last chunk of "
                    f"{self.chunk_size} can be taken back (fork the state before reading what you may take back)."
                )
        if back == self.tokens:
            self.reset()
            return
        for row, n in enumerate(back):
            if n == self.tokens[row]:
                self._clear(row)
                continue
            if n > self.filled[row]:
                self._take_back(row)
            self.filled[row] -= n
            self._unbroken[row] -= n

    def _clear(self, row: int) -> None:
        if self.state is not None:
            self.state[row] = 0
            self._refresh(row)
        self._undo.pop(row, None)
        self.filled[row] = self.written[row] = self._unbroken[row] = 0

    def _take_back(self, row: int) -> None:
        """Reopen a row's last written chunk; the tokens read since were in the chunk after it."""
        assert self.state is not None
        undo, since = self._undo.pop(row), self.filled[row]
        self.state[row] = 0 if undo.state is None else undo.state
        self._refresh(row)
        self.filled[row], self.written[row] = 0, self.written[row] - 1
        self._keep(row, undo.z, undo.x)
        self.filled[row] += since  # crop subtracts from the total of both chunks

    def reset(self) -> None:
        """Back to W0, no tokens read."""
        self.__init__(self.batch, self.chunk_size)  # type: ignore[misc]

    def select(self, rows: list[int]) -> None:
        """Keep the given rows, in this order, repeats included (beam search, batch select, repeat)."""
        if self.z is not None and self.x is not None:
            self.z, self.x = self.z[rows], self.x[rows]
        if self.state is not None and self._reader is not None:
            shared = self._reader is self.state
            self.state = self.state[rows]
            self._reader = self.state if shared else self._reader[rows]
        self.filled, self.written = [self.filled[r] for r in rows], [self.written[r] for r in rows]
        self._unbroken = [self._unbroken[r] for r in rows]
        self._undo = {new: self._undo[old] for new, old in enumerate(rows) if old in self._undo}

    def lend(self, sources: list[int]) -> None:
        """Give row r the state of row sources[r]; what each row has in its open chunk, and how far it is, stay its own."""
        if self.state is not None and self._reader is not None:
            shared = self._reader is self.state
            self.state = self.state[sources]
            self._reader = self.state if shared else self._reader[sources]

    def check_holds_memory(self) -> None:
        if self._abandoned:
            raise InPlaceTTTError("this cache was filled with gradients on, which keeps no memory; fill it under torch.no_grad().")

    def tensors(self) -> dict[str, Tensor]:
        """All that the stream holds, as tensors to save; `restore` is the inverse."""
        self.check_holds_memory()
        held = {"counts": torch.tensor([self.filled, self.written, self._unbroken])}
        if self.state is not None:
            held["state"] = self.state
        if (open_rows := max(self.filled, default=0)) and self.z is not None and self.x is not None:
            held["z"], held["x"] = self.z[:, :open_rows], self.x[:, :open_rows]
        return {name: tensor.contiguous() for name, tensor in held.items()}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], chunk_size: int, dtype: torch.dtype) -> FastWeightStream:
        """A stream from its saved tensors, for a model that computes in `dtype`."""
        filled, written, unbroken = tensors["counts"].tolist()
        stream = cls(len(filled), chunk_size)
        stream.filled, stream.written, stream._unbroken = filled, written, unbroken
        if "z" in tensors:
            stream.z, stream.x = tensors["z"].to(dtype), tensors["x"].to(dtype)
        if "state" in tensors:
            stream.state = tensors["state"].to(state_dtype(dtype))
            stream._reader = stream.state.to(dtype)
        return stream

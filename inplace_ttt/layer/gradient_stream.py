"""A layer's fast weight whose targets are the loss gradient: a chunk is written after the forward that
completes it.

The gradient needs the whole chunk, and the layers and the head above. So a forward only reads and counts;
`inplace_ttt.gradient_reading` then runs the complete chunk with gradients, once more if it came in pieces,
and hands each layer its targets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..layout import ChunkLayout, Span
from ..ops import state_dtype
from .buffers import State
from .stream import FastWeightStream, _Row, _Undo


@dataclass
class Tape:
    """Keys [B, C, r] of a forward with gradients, and probes [B, C, d]: zeros added to each layer's output.
    By layer."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    probes: dict[int, Tensor] = field(default_factory=dict)

    def record(self, layer: int, keys: Tensor, out: Tensor) -> Tensor:
        """Return `out` with a zero added whose gradient is that of the output."""
        self.keys[layer], self.probes[layer] = keys.detach(), torch.zeros_like(out, requires_grad=True)
        return out + self.probes[layer]


class GradientStream(FastWeightStream):
    """State S, and which tokens the open chunk has. Its buffers hold token ids and positions, [B, room, 1],
    int64.

    tape: where the forward under way leaves what its chunk's gradient takes; None where it only reads.
    """

    tape: Tape | None = None

    def take(
        self,
        out: Tensor,
        z: Tensor,
        ids: Tensor,
        positions: Tensor,
        spans: list[Span],
        layer: Any,
        index: int,
    ) -> Tensor:
        """Add what is read to `out` [B, T, d], and take the tokens in: keys z [B, T, r], ids and positions
        [B, T]."""
        self.check_holds_state()
        self._thaw()  # autograd saves no tensor of inference mode
        if self.tape is not None:
            self._read(out, z, layer, whole=z.shape[1] == self.chunk_size)
            return self.tape.record(index, z, out)
        if len(spans) != self.batch:
            raise InPlaceTTTError(
                f"the cache holds {self.batch} sequences, the batch has {len(spans)}; start a new cache."
            )
        with torch.no_grad():
            self._read(out, z, layer)
        self.count(ids, positions, spans)
        return out

    def count(self, ids: Tensor, positions: Tensor, spans: list[Span]) -> None:
        """Take tokens into the rows' open chunks, none beyond their end; spans: the real ones of each row."""
        self._drop_old_undos()
        for index, (row, (start, stop)) in enumerate(zip(self.rows, spans, strict=True)):
            assert row.filled + stop - start <= self.chunk_size, "a forward is split where a chunk ends"
            row.unbroken = (stop - start + (row.unbroken if start == 0 else 0)) if stop == ids.shape[1] else 0
            if start < stop:
                self._open.put(
                    index, row.filled, ids[index, start:stop, None], positions[index, start:stop, None]
                )
                row.filled += stop - start

    @property
    def complete(self) -> list[int]:
        """Rows whose chunk is complete and not written."""
        return [index for index, row in enumerate(self.rows) if row.filled == self.chunk_size]

    @property
    def asks_again(self) -> int:
        return max(self.filled, default=0)

    def forget_attention(self) -> None:
        """The open chunk's tokens cannot be read again without it."""
        for row in self.rows:
            row.filled, row.unbroken, row.undo = 0, 0, None

    def tokens_of(self, row: int) -> tuple[Tensor, Tensor]:
        """Ids and positions [n] of a row's open chunk."""
        ids, positions = self._open.held
        filled = self.rows[row].filled
        return ids[row, :filled, 0], positions[row, :filled, 0]

    def on_tape(self, rows: list[int], tape: Tape) -> GradientStream:
        """Returns a stream that reads these rows and writes nothing, for a forward with gradients."""
        reader = GradientStream(len(rows), self.chunk_size, self.update_on_decode, self.rule)
        reader._state = self._state and (
            self._state if rows == [*range(self.batch)] else self._state.select(rows)
        )
        reader.tape = tape
        return reader

    @torch.no_grad()
    def write_chunks(self, rows: list[int], keys: Tensor, values: Tensor, layer: Any) -> None:
        """Write one step for the complete chunks of these rows, with keys [n, C, r] and targets [n, C, d]."""
        known = None if self._state is None else self._state.value[rows]
        chunk = ChunkLayout.shared((((0, self.chunk_size),),) * len(rows), self.chunk_size, self.chunk_size)
        after = layer.write_targets(keys, values, chunk, known, reads=False)[1]
        if self._state is None:
            self._state = State(after.new_zeros(self.batch, *after.shape[1:]), self.rule)
        for row, state in zip(rows, after, strict=True):
            self._state.put(row, state)

    def close_chunks(self, rows: list[int], before: Tensor | None) -> None:
        """Begin new chunks in these rows; before: their states [n, ·, r] before the steps of the chunk that
        ends."""
        for place, row in enumerate(rows):
            held = self.rows[row]
            ids, positions = (buffer[row, : self.chunk_size].clone() for buffer in self._open.held)
            held.undo = _Undo(before[place] if before is not None and held.written else None, ids, positions)
            held.filled, held.written = 0, held.written + 1

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: InPlaceTTTConfig, dtype: torch.dtype
    ) -> GradientStream:
        counts = tensors["counts"].tolist()
        stream = cls(len(counts[0]), config.chunk_size, config.update_on_decode, config.rule)
        stream.rows = [_Row(*row) for row in zip(*counts, strict=True)]
        if "z" in tensors:
            stream._open.held = tensors["z"], tensors["x"]
        if "state" in tensors:
            stream._state = State(tensors["state"].to(state_dtype(dtype)), config.rule)
        return stream

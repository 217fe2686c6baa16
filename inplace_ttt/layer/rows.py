"""The states and open chunks of a layer's rows, and how tokens enter them.

A row is a sequence of a batch (`stream.FastWeightStream`), or a slot of a server (`serving.slots.Slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..device_copies import on_device
from ..layout import ChunkLayout, Span
from ..rules import Rule
from .buffers import OpenChunks, Reader, State


class StreamedLayer(Reader, Protocol):
    """The parts of a layer that its rows use."""

    def keys(self, z: Tensor) -> Tensor:
        """Returns the keys [..., r] of the layer's input [..., h]."""

    def write(
        self, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None, *, reads: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the reads (only if `reads`) and the new states, as `FastWeight.write` does."""


@dataclass
class Undo:
    """A row's state before its last write, and the Z and X (or ids and positions) of the chunk written."""

    state: Tensor | None
    z: Tensor
    x: Tensor


@dataclass
class Row:
    """The position of one row.

    Attributes:
        filled: tokens in the open chunk.
        written: chunks written.
        unbroken: tokens since padding, or since tokens that the row did not receive.
        undo: the row before its last write, while that write can be undone.
    """

    filled: int = 0
    written: int = 0
    unbroken: int = 0
    undo: Undo | None = None


class ChunkRows:
    """The rows of one layer. A token reads the chunks that were complete before it.

    A chunk is written after its last token is read. A row without a written chunk reads nothing, or the zeros
    of its state.

    Args:
        rows: number of rows.
        chunk_size: tokens per chunk.
        rule: the update rule.
    """

    def __init__(self, rows: int, chunk_size: int, rule: Rule) -> None:
        self.chunk_size, self.rule = chunk_size, rule
        self.rows = [Row() for _ in range(rows)]
        self._open = OpenChunks(rows, chunk_size)
        self._state: State | None = None

    def _before(self, row: int) -> Tensor | None:
        """Returns a row's state [1, ·, r], or None for zero."""
        return None if self._state is None else self._state.value[row : row + 1]

    def _read(
        self, out: Tensor, z: Tensor, layer: StreamedLayer, row: int | None = None, *, whole: bool = False
    ) -> None:
        """Adds the reads to `out`. `whole` is True if the tokens are a whole chunk of each row read."""
        if self._state is not None and (row is None or self._before(row) is not None):
            self._state.add_read(out, z, layer, row, whole=whole)

    def _advance(
        self,
        out: Tensor,
        z: Tensor,
        x: Tensor,
        spans: Sequence[Span],
        layer: StreamedLayer,
        row: int | None = None,
        *,
        undoable: bool,
    ) -> None:
        """Reads the tokens of all rows, or of one row, and adds them to the rows' chunks.

        Args:
            out: outputs without fast weights [B, T, d], or [1, T, d] for one row; the reads are added in
                place.
            z: keys [B, T, r].
            x: target source [B, T, d].
            spans: for each row, the span of its tokens without padding.
            layer: the layer that reads and writes.
            row: the row; None for all.
            undoable: the last write of each row can be undone.
        """
        rows = list(enumerate(range(len(self.rows)) if row is None else (row,)))
        lengths = [stop - start for start, stop in spans]
        if all(self.rows[index].filled + lengths[place] <= self.chunk_size for place, index in rows):
            self._read(out, z, layer, row, whole=all(length == self.chunk_size for length in lengths))
            reading = [place for place, length in enumerate(lengths) if length]
            if z.shape[1] == 1 and len(reading) > 1:
                among = [rows[place][1] for place in reading]
                self._take_each(reading, z[:, 0], x[:, 0], among, layer, undoable)
                return
            for place, index in rows:
                start, stop = spans[place]
                if start < stop:
                    self._take(index, z[place, start:stop], x[place, start:stop], layer, undoable=undoable)
            return
        # First the open chunks are filled, then whole chunks of all rows are read together. At last comes
        # each row's last whole chunk, if its write can be undone, and the tokens after it.
        whole = []
        for place, index in rows:
            start, stop = spans[place]
            opened = min(start + -self.rows[index].filled % self.chunk_size, stop)
            self._take_span(
                out, z, x, place, index, (start, opened), layer, undoable=stop if undoable else None
            )
            chunks = max((stop - opened) // self.chunk_size - undoable, 0)
            whole.append((opened, opened + chunks * self.chunk_size))
        if any(start < stop for start, stop in whole):
            self._take_whole(out, z, x, whole, layer, row)
        for place, index in rows:
            start, stop = whole[place][1], spans[place][1]
            self._take_span(
                out, z, x, place, index, (start, stop), layer, undoable=stop if undoable else None
            )

    def _take_span(
        self,
        out: Tensor,
        z: Tensor,
        x: Tensor,
        place: int,
        row: int,
        span: Span,
        layer: StreamedLayer,
        *,
        undoable: int | None,
    ) -> None:
        """Reads a span of a row and adds its tokens, chunk by chunk.

        The row's tokens are in row `place` of the tensors. They end at `undoable`, if the last write can be
        undone.
        """
        start, stop = span
        while start < stop:
            end = min(start + self.chunk_size - self.rows[row].filled, stop)
            self._read(
                out[place : place + 1, start:end],
                z[place : place + 1, start:end],
                layer,
                row,
                whole=end - start == self.chunk_size,
            )
            last = undoable is not None and undoable - end < self.chunk_size
            self._take(row, z[place, start:end], x[place, start:end], layer, undoable=last)
            start = end

    def _take_whole(
        self,
        out: Tensor,
        z: Tensor,
        x: Tensor,
        spans: Sequence[Span],
        layer: StreamedLayer,
        row: int | None = None,
    ) -> None:
        """Reads and writes spans of whole chunks, of all rows together or of one row.

        These writes cannot be undone.
        """
        documents = tuple((span,) if span[0] < span[1] else () for span in spans)
        layout = ChunkLayout.shared(documents, z.shape[1], self.chunk_size)
        every = None if self._state is None else self._state.value
        before = every if row is None else self._before(row)
        read, after = layer.write(z, x, layout, before, reads=True)
        out += read.to(out.dtype)
        if row is None:
            self._state = State(after, self.rule)
        else:
            self._put(row, after[0])
        for index, (start, stop) in zip(range(len(self.rows)) if row is None else (row,), spans, strict=True):
            self.rows[index].written += (stop - start) // self.chunk_size

    def _take(self, row: int, z: Tensor, x: Tensor, layer: StreamedLayer, undoable: bool) -> None:
        """Adds tokens [n, h] and [n, d] to a row's open chunk, and writes the chunk if it is complete."""
        held = self.rows[row]
        if held.filled + len(z) < self.chunk_size:
            self._open.put(row, held.filled, z, x)
            held.filled += len(z)
            return
        z, x = self._open.followed_by(row, held.filled, z, x)
        self._write(row, z, x, layer, undoable)

    def _write(self, row: int, z: Tensor, x: Tensor, layer: StreamedLayer, undoable: bool) -> None:
        """Writes a whole chunk [C, h] and [C, d] to a row. Afterwards the row's open chunk is empty."""
        held, before = self.rows[row], self._before(row)
        chunk = ChunkLayout.shared((((0, self.chunk_size),),), self.chunk_size, self.chunk_size)
        after = layer.write(z[None], x[None], chunk, before, reads=False)[1]
        if undoable:
            kept = before[0].clone() if before is not None and held.written else None
            held.undo = Undo(kept, z.clone(), x.clone())
        self._put(row, after[0])
        held.filled, held.written = 0, held.written + 1

    def _take_each(
        self,
        places: Sequence[int],
        z: Tensor,
        x: Tensor,
        rows: Sequence[int],
        layer: StreamedLayer,
        undoable: bool,
    ) -> None:
        """Adds one token of each of several rows to their open chunks, and writes the chunks it completes.

        Args:
            places: for each row, the index of its token in `z` and `x`.
            z: keys [N, r].
            x: target source [N, d].
            rows: the rows.
            layer: the layer that writes.
            undoable: the writes can be undone.
        """
        open_rows = []
        for place, row in zip(places, rows, strict=True):
            if self.rows[row].filled + 1 < self.chunk_size:
                open_rows.append((place, row, self.rows[row].filled))
                self.rows[row].filled += 1
            else:
                self._take(row, z[place : place + 1], x[place : place + 1], layer, undoable)
        if len(open_rows) == 1:
            [(place, row, position)] = open_rows
            self._open.put(row, position, z[place : place + 1], x[place : place + 1])
        elif open_rows:
            self._open.make_room(1 + max(position for _, _, position in open_rows), z, x)
            self._open.put_each(*on_device(torch.tensor([*zip(*open_rows, strict=True)]), z.device), z, x)

    def _put(self, row: int, state: Tensor) -> None:
        if self._state is None:
            self._state = State(state.new_zeros(len(self.rows), *state.shape), self.rule)
        self._state.put(row, state)

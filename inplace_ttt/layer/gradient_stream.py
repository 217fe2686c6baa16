"""The stream of a layer with `target: gradient`. A chunk is written after the forward that completes it.

The gradient needs the whole chunk, the layers above and the head. So the forward itself only reads and counts
tokens. `inplace_ttt.gradient_reading` then runs the complete chunk with gradients, and computes each layer's
targets. If a chunk was read in several pieces, it runs once more for the gradients.
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
from .rows import Row, Undo
from .stream import FastWeightStream


@dataclass
class Tape:
    """The record of a forward with gradients.

    Attributes:
        keys: keys [B, C, r] by layer.
        probes: zeros [B, C, d] by layer, added to the layer's output. Their gradient is the gradient at that
            output. After the backward, the layer's targets V replace them.
    """

    keys: dict[int, Tensor] = field(default_factory=dict)
    probes: dict[int, Tensor] = field(default_factory=dict)

    def record(self, layer: int, keys: Tensor, out: Tensor) -> Tensor:
        """Records a layer's keys [B, C, r], and returns `out` [B, C, d] plus a new probe."""
        self.keys[layer], self.probes[layer] = keys.detach(), torch.zeros_like(out, requires_grad=True)
        return out + self.probes[layer]


class GradientStream(FastWeightStream):
    """The state S of one layer, and the tokens of the open chunk.

    The buffers of the open chunk hold token ids and positions, [B, n, 1], int64.

    Attributes:
        tape: the record of the current forward, if it runs with gradients; None if it only reads.
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
        """Adds the reads to `out`, and the tokens to the open chunks.

        With a tape, the forward runs a complete chunk for its gradients, and no tokens are added.

        Args:
            out: outputs without fast weights [B, T, d].
            z: keys [B, T, r].
            ids: token ids [B, T].
            positions: positions [B, T].
            spans: for each row, the span of its tokens without padding.
            layer: the layer that reads.
            index: the layer's index.

        Returns:
            The outputs [B, T, d].
        """
        self.check_holds_state()
        self._thaw()  # autograd cannot save tensors made in inference mode
        if self.tape is not None:
            out = out.clone()  # some quantized layers return a view that autograd forbids to change in place
            self._read(out, z, layer, whole=z.shape[1] == self.chunk_size)
            return self.tape.record(index, z, out)
        if len(spans) != self.batch:
            raise InPlaceTTTError(
                f"the cache holds {self.batch} sequences, but the batch has {len(spans)}; start a new cache."
            )
        with torch.no_grad():
            self._read(out, z, layer)
        self.count(ids, positions, spans)
        return out

    def count(self, ids: Tensor, positions: Tensor, spans: list[Span]) -> None:
        """Adds tokens to the open chunks, but never beyond the end of a chunk.

        Args:
            ids: token ids [B, T].
            positions: positions [B, T].
            spans: for each row, the span of its tokens without padding.
        """
        self._drop_old_undos()
        for index, (row, (start, stop)) in enumerate(zip(self.rows, spans, strict=True)):
            assert row.filled + stop - start <= self.chunk_size, "forwards are split at the ends of chunks"
            row.unbroken = (stop - start + (row.unbroken if start == 0 else 0)) if stop == ids.shape[1] else 0
            if start < stop:
                self._open.put(
                    index, row.filled, ids[index, start:stop, None], positions[index, start:stop, None]
                )
                row.filled += stop - start

    @property
    def complete(self) -> list[int]:
        """Rows with a complete chunk that is not written yet."""
        return [index for index, row in enumerate(self.rows) if row.filled == self.chunk_size]

    @property
    def asks_again(self) -> int:
        return max(self.filled, default=0)

    def forget_attention(self) -> None:
        """Empties the open chunks, whose tokens cannot be read again without the KV cache."""
        for row in self.rows:
            row.filled, row.unbroken, row.undo = 0, 0, None

    def tokens_of(self, row: int) -> tuple[Tensor, Tensor]:
        """Returns the token ids and the positions of a row's open chunk, both [n]."""
        ids, positions = self._open.held
        filled = self.rows[row].filled
        return ids[row, :filled, 0], positions[row, :filled, 0]

    def on_tape(self, rows: list[int], tape: Tape) -> GradientStream:
        """Returns a stream that reads the given rows and writes nothing, for a forward with gradients."""
        reader = GradientStream(len(rows), self.chunk_size, self.update_on_decode, self.rule)
        reader._state = self._state and (
            self._state if rows == [*range(self.batch)] else self._state.select(rows)
        )
        reader.tape = tape
        return reader

    @torch.no_grad()
    def write_chunks(self, rows: list[int], keys: Tensor, values: Tensor, layer: Any) -> None:
        """Writes one step for the complete chunks of n rows.

        Args:
            rows: the rows.
            keys: keys [n, C, r].
            values: targets [n, C, d].
            layer: the layer that writes.
        """
        known = None if self._state is None else self._state.value[rows]
        chunk = ChunkLayout.shared((((0, self.chunk_size),),) * len(rows), self.chunk_size, self.chunk_size)
        after = layer.write_targets(keys, values, chunk, known, reads=False)[1]
        if self._state is None:
            self._state = State(after.new_zeros(self.batch, *after.shape[1:]), self.rule)
        for row, state in zip(rows, after, strict=True):
            self._state.put(row, state)

    def close_chunks(self, rows: list[int], before: Tensor | None) -> None:
        """Begins new chunks in n rows, after the steps of their complete chunks.

        Args:
            rows: the rows.
            before: the states [n, ·, r] of these rows before the steps; None for zero.
        """
        for place, row in enumerate(rows):
            held = self.rows[row]
            ids, positions = (buffer[row, : self.chunk_size].clone() for buffer in self._open.held)
            held.undo = Undo(before[place] if before is not None and held.written else None, ids, positions)
            held.filled, held.written = 0, held.written + 1

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: InPlaceTTTConfig, dtype: torch.dtype
    ) -> GradientStream:
        counts = tensors["counts"].tolist()
        stream = cls(len(counts[0]), config.chunk_size, config.update_on_decode, config.rule)
        stream.rows = [Row(*row) for row in zip(*counts, strict=True)]
        if "z" in tensors:
            stream._open.held = tensors["z"], tensors["x"]
        if "state" in tensors:
            stream._state = State(tensors["state"].to(state_dtype(dtype)), config.rule)
        return stream

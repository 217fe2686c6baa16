"""Buffers of a stream for the rows of a batch: states, the maps for reads, and open chunks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ..ops import add_indexed_reads, form_of, state_dtype
from ..ops.precision import in_range
from ..rules import Rule


class Reader(Protocol):
    """The parts of a layer that a read of a state uses."""

    @property
    def eta(self) -> float: ...
    def readout(self, state: Tensor) -> Tensor:
        """Returns the result of `FastWeight.readout`. It is called only with `preserve_row_norms`."""


class State:
    """The states of all rows [B, ·, r], and the maps [B, d, r] that reads multiply keys with.

    A map has the dtype of the output. If reads use S itself, in the dtype of S, map and state are one tensor.
    Otherwise a row's map is computed at the first read that needs it. With `preserve_row_norms`, the layer
    computes the map.

    Args:
        value: the states.
        rule: the update rule.
    """

    _read: Tensor | None
    _factor: Tensor | None
    _stale: set[int]
    """Rows whose map is out of date."""
    _eta: float | None
    """The η of the maps if row norms are kept, else None."""

    def __init__(self, value: Tensor, rule: Rule) -> None:
        self.value, self.rule = value, rule
        self._read, self._factor, self._stale, self._eta = None, None, set(), None

    @classmethod
    def empty(
        cls, rows: int, shape: tuple[int, int], d: int, dtype: torch.dtype, rule: Rule, device: torch.device
    ) -> State:
        """Returns states that are all zero. A row must be `put` before it is read.

        Args:
            rows: number of states.
            shape: shape of one state.
            d: width of the output.
            dtype: dtype of reads.
            rule: the update rule.
            device: where to put the states.
        """
        state = cls(torch.zeros(rows, *shape, dtype=state_dtype(dtype), device=device), rule)
        state._make_room(d, dtype)
        return state

    def _make_room(self, d: int, dtype: torch.dtype) -> None:
        """Allocates the maps of all rows and marks them out of date, unless reads use the state itself."""
        rows, is_read = len(self.value), self.rule.reads_state and self.value.dtype == dtype
        self._read = (
            self.value if is_read else self.value.new_zeros(rows, d, self.value.shape[-1], dtype=dtype)
        )
        self._factor = self.value.new_ones(rows, 1, 1) if dtype == torch.float16 else None
        self._stale = set() if is_read else set(range(rows))

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        held = {id(tensor): tensor for tensor in (self.value, self._read, self._factor) if tensor is not None}
        return sum(tensor[0].nbytes for tensor in held.values())

    def add_reads_of(self, places: Tensor, rows: Tensor, out: Tensor, z: Tensor, eta: float) -> None:
        """Adds the reads of single tokens, times η, to `out` in place.

        The maps of the rows must be up to date (`refresh`), so that a CUDA graph can record this.

        Args:
            places: each token's index in `out` and `z`, [n] int64.
            rows: the row that each token reads, [n] int64.
            out: outputs [N, d].
            z: keys [N, r].
            eta: η.
        """
        assert self._read is not None
        add_indexed_reads(out, z, self._read, places, rows, factors=self._factor, scale=eta)

    def copy_row(self, source: int, row: int) -> None:
        """Copies row `source` to row `row`."""
        for tensor in (self.value, self._read, self._factor):
            if tensor is not None:
                tensor[row] = tensor[source]
        (self._stale.add if source in self._stale else self._stale.discard)(row)

    def add_read(
        self, out: Tensor, z: Tensor, layer: Reader, row: int | None = None, *, whole: bool = False
    ) -> None:
        """Adds the reads of the keys, times η, to `out` in place.

        Args:
            out: outputs [B, T, d], or [1, T, d] for one row.
            z: keys [B, T, r], or [1, T, r] for one row.
            layer: the layer that reads.
            row: the row to read; None for all.
            whole: the keys are a whole chunk, so no other keys read these states. If T < d, the ridge rule
                then solves for the T keys and computes no map. This choice never depends on maps computed
                before, so a session loaded from its file computes the same bits.
        """
        rows = range(len(self.value)) if row is None else range(row, row + 1)
        part, eta = slice(rows.start, rows.stop), layer.eta
        read_once = form_of(self.rule).read_once
        if whole and read_once is not None and z.shape[1] < out.shape[-1]:
            out += (read_once(self.value[part], z, self.rule) * eta).to(out.dtype)
            return
        made_for = eta if self.rule.keeps_row_norms else None
        # autocast was turned on or off, or η changed
        if self._read is None or self._read.dtype != out.dtype or self._eta != made_for:
            self._make_room(out.shape[-1], out.dtype)
            self._eta = made_for
        self.refresh(rows, layer)
        assert self._read is not None
        read = self._read[part]
        if self._factor is None:
            out.baddbmm_(z.to(out.dtype), read.mT, alpha=eta)
        else:
            out += ((z.to(out.dtype) @ read.mT) * (eta * self._factor[part])).to(out.dtype)

    def refresh(self, rows: Iterable[int], layer: Reader | None = None) -> None:
        """Computes those maps of `rows` that are out of date, in one batch."""
        assert self._read is not None
        if stale := sorted(self._stale.intersection(rows)):
            # a slice avoids a copy of the states
            together = slice(stale[0], stale[-1] + 1) if stale[-1] - stale[0] < len(stale) else stale
            self._read[together], factor = in_range(
                self._readout(self.value[together], layer), self._read.dtype
            )
            if self._factor is not None and factor is not None:
                self._factor[together] = factor
            self._stale.difference_update(stale)

    def _readout(self, state: Tensor, layer: Reader | None) -> Tensor:
        return (
            layer.readout(state)
            if self.rule.keeps_row_norms and layer is not None
            else form_of(self.rule).readout(state, self.rule)
        )

    def put(self, row: int, state: Tensor | None) -> None:
        """Sets a row's state [·, r]; None stands for zero."""
        self.value[row] = 0 if state is None else state
        if self._read is not None and self._read is not self.value:
            self._stale.add(row)

    def select(self, rows: list[int]) -> State:
        """Returns the states of the given rows, in their order."""
        chosen = copy.copy(self)
        chosen.value = self.value[rows]
        chosen._read = (
            chosen.value if self._read is self.value else None if self._read is None else self._read[rows]
        )
        chosen._factor = None if self._factor is None else self._factor[rows]
        chosen._stale = {place for place, row in enumerate(rows) if row in self._stale}
        return chosen

    def thaw(self) -> None:
        """Replaces tensors made under torch.inference_mode(), so that they can be changed outside of it."""
        if self.value.is_inference():
            self.value, self._read = self.value.clone(), None
        elif self._read is not None and self._read.is_inference():
            self._read = None


class OpenChunks:
    """The keys [B, n, h] and the target source [B, n, d] of all open chunks.

    Both grow with the longest open chunk: n is 64 or a power of two, and at most the chunk size.

    Args:
        batch: B.
        chunk_size: tokens per chunk.
    """

    def __init__(self, batch: int, chunk_size: int) -> None:
        self.batch, self.chunk_size = batch, chunk_size
        self.held: tuple[Tensor, ...] = ()

    def put(self, row: int, first: int, *new: Tensor) -> None:
        """Stores tokens [n, h] and [n, d] in the open chunk of `row`, from position `first` on."""
        last = first + len(new[0])
        self.make_room(last, *new)
        for buffer, tensor in zip(self.held, new, strict=True):
            buffer[row, first:last] = tensor

    def put_each(self, places: Tensor, rows: Tensor, positions: Tensor, *new: Tensor) -> None:
        """Stores one token of each of several rows. `make_room` must have been called before.

        Args:
            places: each token's index in the new tensors, [n] int64.
            rows: each token's row, [n] int64.
            positions: each token's position in its row's open chunk, [n] int64.
            *new: the tokens [N, h] and [N, d].
        """
        for buffer, tensor in zip(self.held, new, strict=True):
            buffer[rows, positions] = tensor[places]

    def followed_by(self, row: int, filled: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Returns the first `filled` tokens of a row's open chunk, followed by the new ones."""
        return (
            tuple(
                torch.cat([buffer[row, :filled], tensor])
                for buffer, tensor in zip(self.held, new, strict=True)
            )
            if filled
            else new
        )

    def make_room(self, tokens: int, *like: Tensor) -> None:
        """Makes room for this number of tokens per row, of the widths and dtypes of `like`."""
        self.held = tuple(self._with_room(which, tensor, tokens) for which, tensor in enumerate(like))

    def _with_room(self, which: int, like: Tensor, tokens: int) -> Tensor:
        buffer = self.held[which] if self.held else None
        if buffer is not None and buffer.shape[1] >= tokens:
            return buffer
        grown = like.new_zeros(
            self.batch, min(self.chunk_size, max(64, 1 << (tokens - 1).bit_length())), like.shape[-1]
        )
        if buffer is not None:
            grown[:, : buffer.shape[1]] = buffer
        return grown

    def select(self, rows: list[int]) -> OpenChunks:
        """Returns the open chunks of the given rows, in their order."""
        chosen = OpenChunks(len(rows), self.chunk_size)
        chosen.held = tuple(buffer[rows] for buffer in self.held)
        return chosen

    def thaw(self) -> None:
        """Replaces tensors made under torch.inference_mode(), so that they can be changed outside of it."""
        self.held = tuple(buffer.clone() if buffer.is_inference() else buffer for buffer in self.held)

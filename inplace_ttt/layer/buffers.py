"""What a stream holds of every row: the state and what is read of it, and the open chunks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ..ops import form_of, state_dtype
from ..ops.precision import in_range
from ..rules import Rule


class Reader(Protocol):
    """What reads of a state ask of their layer."""

    @property
    def eta(self) -> float: ...
    def readout(self, state: Tensor) -> Tensor:
        """As `FastWeight.readout`; asked for only where the row norms of W0 are kept."""


class State:
    """The state of every row [B, ·, r], and what reads use of it [B, d, r], in their dtype; one tensor where
    S itself is read.

    The second is made of a row at the first read that needs it; where the row norms of W0 are kept, by the
    layer.
    """

    _read: Tensor | None
    _factor: Tensor | None
    _stale: set[int]
    """Rows of whose value what reads use is still to be made."""
    _eta: float | None
    """What it is made for where row norms are kept."""

    def __init__(self, value: Tensor, rule: Rule) -> None:
        self.value, self.rule = value, rule
        self._read, self._factor, self._stale, self._eta = None, None, set(), None

    @classmethod
    def empty(
        cls, rows: int, shape: tuple[int, int], d: int, dtype: torch.dtype, rule: Rule, device: torch.device
    ) -> State:
        """Rows of states [*shape] in which nothing is written yet: none may be read before it is put."""
        state = cls(torch.zeros(rows, *shape, dtype=state_dtype(dtype), device=device), rule)
        state._make_room(d, dtype)
        return state

    def _make_room(self, d: int, dtype: torch.dtype) -> None:
        """For what reads use of every row, all of it still to be made; none where they use the state as it
        is."""
        rows, is_read = len(self.value), self.rule.reads_state and self.value.dtype == dtype
        self._read = (
            self.value if is_read else self.value.new_zeros(rows, d, self.value.shape[-1], dtype=dtype)
        )
        self._factor = self.value.new_ones(rows, 1, 1) if dtype == torch.float16 else None
        self._stale = set() if is_read else set(range(rows))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        held = {id(tensor): tensor for tensor in (self.value, self._read, self._factor) if tensor is not None}
        return sum(tensor[0].nbytes for tensor in held.values())

    def read_each(self, z: Tensor, rows: list[int]) -> Tensor:
        """η left out, what key z[i] of [n, r] reads in a row of its own, [n, d].

        One product, except on a CPU, which reads that many matrices faster one by one.
        """
        maps = self._fresh(rows)
        keys, where = z.to(maps.dtype), torch.tensor(rows, device=z.device)
        if z.device.type == "cpu":
            read = torch.stack([torch.mv(maps[row], key) for key, row in zip(keys, rows, strict=True)])
        else:
            read = torch.bmm(maps[where], keys[:, :, None])[..., 0]
        return read if self._factor is None else read * self._factor[where, 0]

    def copy_row(self, source: int, row: int) -> None:
        """Give a row what another one holds."""
        for tensor in (self.value, self._read, self._factor):
            if tensor is not None:
                tensor[row] = tensor[source]
        (self._stale.add if source in self._stale else self._stale.discard)(row)

    def add_read(
        self, out: Tensor, z: Tensor, layer: Reader, row: int | None = None, *, whole: bool = False
    ) -> None:
        """out [B, T, d] += what keys z [B, T, r] read; of one row, [1, T, d] and [1, T, r].

        whole: the keys are a whole chunk's, and no others read what these rows hold now, so that least
            squares solve for T keys and
        not for d outputs. What was made before has no say in it: a session goes on from its file bit for bit.
        """
        rows = range(len(self.value)) if row is None else range(row, row + 1)
        part, eta = slice(rows.start, rows.stop), layer.eta
        read_once = form_of(self.rule).read_once
        if whole and read_once is not None and z.shape[1] < out.shape[-1]:
            out += (read_once(self.value[part], z, self.rule) * eta).to(out.dtype)
            return
        made_for = eta if self.rule.keeps_row_norms else None
        # autocast, or another η, came or went
        if self._read is None or self._read.dtype != out.dtype or self._eta != made_for:
            self._make_room(out.shape[-1], out.dtype)
            self._eta = made_for
        read = self._fresh(rows, layer)[part]
        if self._factor is None:
            out.baddbmm_(z.to(out.dtype), read.mT, alpha=eta)
        else:
            out += ((z.to(out.dtype) @ read.mT) * (eta * self._factor[part])).to(out.dtype)

    def _fresh(self, rows: Iterable[int], layer: Reader | None = None) -> Tensor:
        """What reads use of all rows, made for those of these rows that want it, together."""
        assert self._read is not None
        if stale := sorted(self._stale.intersection(rows)):
            # a slice copies no states
            together = slice(stale[0], stale[-1] + 1) if stale[-1] - stale[0] < len(stale) else stale
            self._read[together], factor = in_range(
                self._readout(self.value[together], layer), self._read.dtype
            )
            if self._factor is not None and factor is not None:
                self._factor[together] = factor
            self._stale.difference_update(stale)
        return self._read

    def _readout(self, state: Tensor, layer: Reader | None) -> Tensor:
        return (
            layer.readout(state)
            if self.rule.keeps_row_norms and layer is not None
            else form_of(self.rule).readout(state, self.rule)
        )

    def put(self, row: int, state: Tensor | None) -> None:
        """Set a row's state [·, r]; None is zero."""
        self.value[row] = 0 if state is None else state
        if self._read is not None and self._read is not self.value:
            self._stale.add(row)

    def select(self, rows: list[int]) -> State:
        chosen = copy.copy(self)
        chosen.value = self.value[rows]
        chosen._read = (
            chosen.value if self._read is self.value else None if self._read is None else self._read[rows]
        )
        chosen._factor = None if self._factor is None else self._factor[rows]
        chosen._stale = {place for place, row in enumerate(rows) if row in self._stale}
        return chosen

    def thaw(self) -> None:
        if self.value.is_inference():
            self.value, self._read = self.value.clone(), None
        elif self._read is not None and self._read.is_inference():
            self._read = None


class OpenChunks:
    """The open chunks' keys [B, room, h] and target source [B, room, d]; they get room for more rows as these
    come."""

    def __init__(self, batch: int, chunk_size: int) -> None:
        self.batch, self.chunk_size = batch, chunk_size
        self.held: tuple[Tensor, ...] = ()

    def put(self, row: int, first: int, *new: Tensor) -> None:
        """Rows [n, h] and [n, d] of one sequence, from place `first` on."""
        last = first + len(new[0])
        self.held = tuple(self._with_room(i, like, last) for i, like in enumerate(new))
        for buffer, tensor in zip(self.held, new, strict=True):
            buffer[row, first:last] = tensor

    def followed_by(self, row: int, filled: int, *new: Tensor) -> tuple[Tensor, ...]:
        """A sequence's first `filled` rows with the new ones behind them."""
        return (
            tuple(
                torch.cat([buffer[row, :filled], tensor])
                for buffer, tensor in zip(self.held, new, strict=True)
            )
            if filled
            else new
        )

    def _with_room(self, which: int, like: Tensor, rows: int) -> Tensor:
        buffer = self.held[which] if self.held else None
        if buffer is not None and buffer.shape[1] >= rows:
            return buffer
        grown = like.new_zeros(
            self.batch, min(self.chunk_size, max(64, 1 << (rows - 1).bit_length())), like.shape[-1]
        )
        if buffer is not None:
            grown[:, : buffer.shape[1]] = buffer
        return grown

    def select(self, rows: list[int]) -> OpenChunks:
        chosen = OpenChunks(len(rows), self.chunk_size)
        chosen.held = tuple(buffer[rows] for buffer in self.held)
        return chosen

    def thaw(self) -> None:
        self.held = tuple(buffer.clone() if buffer.is_inference() else buffer for buffer in self.held)

"""The fast weights of all slots of one layer, and their update in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..layer.buffers import State
from ..layer.rows import ChunkRows, Row, StreamedLayer
from .tokens import StepTokens, Tokens


class Slots(ChunkRows):
    """The states, and the open chunks' keys and target sources, of all slots of one layer.

    A request's number of chunks and of tokens in the open chunk follow from the number of tokens read. So a
    slot is given to the next request without being cleared: values of an earlier request are never read.

    Args:
        slots: the number of slots, including slot 0.
        d: the layer's output features.
        h: the layer's input features on this rank.
        dtype: dtype of the keys and the sources.

    Attributes:
        writes: False if requests only read states. Open chunks are left out then.
    """

    def __init__(
        self, slots: int, config: InPlaceTTTConfig, d: int, h: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(slots, config.chunk_size, config.rule)
        self.writes = config.target != "gradient"
        rows, width = config.state_shape(d, h)
        self._state: State = State.empty(slots, (rows, width), d, dtype, config.rule, device)
        room = self.chunk_size if self.writes else 0
        # keys [slots, C, r], and the target source [slots, C, d]
        self._open.held = tuple(torch.zeros(slots, room, n, dtype=dtype, device=device) for n in (width, d))

    @property
    def nbytes(self) -> int:
        """Bytes per slot."""
        return self._state.row_bytes + sum(buffer[0].nbytes for buffer in self._open.held)

    def copy(self, source: int, slot: int, seen: int) -> None:
        """Copies a slot's content after `seen` tokens, from slot `source` to slot `slot`."""
        written, filled = divmod(seen, self.chunk_size)
        if written:
            self._state.copy_row(source, slot)
        for buffer in self._open.held:
            buffer[slot, :filled] = buffer[source, :filled]

    def held(self, slot: int, seen: int) -> dict[str, Tensor]:
        """Returns copies in host memory of a slot's content after `seen` tokens.

        They are the tensors of a stream with one row: `counts`, and, unless empty, `state`, `z` and `x`.
        """
        written, filled = divmod(seen, self.chunk_size)
        held = {"counts": torch.tensor([[filled], [written], [seen]])}
        if written:
            held["state"] = self._state.value[slot : slot + 1]
        if filled:
            held |= {
                name: buffer[slot : slot + 1, :filled]
                for name, buffer in zip("zx", self._open.held, strict=True)
            }
        return {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}

    def restore(self, slot: int, held: Mapping[str, Tensor]) -> None:
        """Writes into a slot the tensors that `held` returned."""
        if "state" in held:
            self._state.put(slot, held["state"][0].to(self._state.value))
        if "z" in held and self.writes:
            filled = int(held["counts"][0, 0])
            for name, buffer in zip("zx", self._open.held, strict=True):
                buffer[slot, :filled] = held[name][0, :filled].to(buffer)

    def advance(self, out: Tensor, z: Tensor, x: Tensor, tokens: StepTokens, layer: StreamedLayer) -> None:
        """Reads and writes the tokens of a step.

        Args:
            out: the layer's output [N, d]; the reads are added to it in place.
            z: keys [N, r].
            x: target source [N, d].
            tokens: the requests, with their tokens and slots.
            layer: the layer whose rule and target generator apply.
        """
        places, read, stored, positions = tokens.index(len(out))
        if len(places):
            self._state.add_reads_of(places, read, out, z, layer.eta)
            if self.writes:
                self._open.put_each(places, stored, positions, z, x)
        for request in tokens.longer:
            self._enter(request)
            part = slice(request.start, request.stop)
            row = out[None, part], z[None, part], x[None, part]
            if self.writes:
                span = 0, request.stop - request.start
                self._advance(*row, [span], layer, request.slot, undoable=False)
            else:
                self._read(*row[:2], layer, request.slot)

    def refresh(self, slots: Iterable[int]) -> None:
        """Updates the maps with which single tokens read these slots."""
        self._state.refresh(slots)

    def write_full(self, slot: int, written: int, layer: StreamedLayer) -> None:
        """Writes a slot's open chunk, all of whose tokens are stored.

        Args:
            slot: the slot.
            written: the number of chunks written before.
            layer: the layer that writes.
        """
        self.rows[slot] = Row(self.chunk_size, written)
        z, x = (buffer[slot] for buffer in self._open.held)
        self._write(slot, z, x, layer, undoable=False)

    def _enter(self, request: Tokens) -> None:
        """Sets the position of a request's slot."""
        written, filled = divmod(request.seen, self.chunk_size)
        self.rows[request.slot] = Row(filled, written)

    def _before(self, row: int) -> Tensor | None:
        return self._state.value[row : row + 1] if self.rows[row].written else None

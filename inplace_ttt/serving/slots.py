"""The fast weights of all slots of one layer, and their update in a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..layer.buffers import State
from ..layer.stream import StreamedLayer
from ..layout import ChunkLayout


class Slots:
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
        state: the states [slots, ·, r], and the matrices [slots, d, r] that reads use.
        keys: keys of the open chunks [slots, C, r].
        sources: target sources of the open chunks [slots, C, d].
    """

    def __init__(
        self, slots: int, config: InPlaceTTTConfig, d: int, h: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.chunk_size, self.writes = config.chunk_size, config.target != "gradient"
        rows, width = config.state_shape(d, h)
        self.state = State.empty(slots, (rows, width), d, dtype, config.rule, device)
        room = self.chunk_size if self.writes else 0
        self.keys = torch.zeros(slots, room, width, dtype=dtype, device=device)
        self.sources = torch.zeros(slots, room, d, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes per slot."""
        return self.state.row_bytes + self.keys[0].nbytes + self.sources[0].nbytes

    def copy(self, source: int, slot: int, seen: int) -> None:
        """Copies a slot's content after `seen` tokens, from slot `source` to slot `slot`."""
        written, filled = divmod(seen, self.chunk_size)
        if written:
            self.state.copy_row(source, slot)
        for tensor in (self.keys, self.sources):
            tensor[slot, :filled] = tensor[source, :filled]

    def held(self, slot: int, seen: int) -> dict[str, Tensor]:
        """Returns copies in host memory of a slot's content after `seen` tokens.

        They are the tensors of a stream with one row: `counts`, and, unless empty, `state`, `z` and `x`.
        """
        written, filled = divmod(seen, self.chunk_size)
        held = {"counts": torch.tensor([[filled], [written], [seen]])}
        if written:
            held["state"] = self.state.value[slot : slot + 1]
        if filled:
            held |= {"z": self.keys[slot : slot + 1, :filled], "x": self.sources[slot : slot + 1, :filled]}
        return {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}

    def restore(self, slot: int, held: Mapping[str, Tensor]) -> None:
        """Writes into a slot the tensors that `held` returned."""
        if "state" in held:
            self.state.put(slot, held["state"][0].to(self.state.value))
        if "z" in held and self.writes:
            filled = int(held["counts"][0, 0])
            self.keys[slot, :filled] = held["z"][0, :filled].to(self.keys)
            self.sources[slot, :filled] = held["x"][0, :filled].to(self.sources)

    def advance(self, out: Tensor, z: Tensor, x: Tensor, slot: int, seen: int, layer: StreamedLayer) -> None:
        """Reads and writes one request's tokens.

        A token reads the chunks completed before it. A chunk is written when its last token has been read.

        Args:
            out: the layer's output [n, d]; the reads are added to it in place.
            z: keys [n, r].
            x: target source [n, d].
            slot: the request's slot.
            seen: the number of tokens that the slot's state has read.
            layer: the layer whose rule and target generator apply.
        """
        written, filled = divmod(seen, self.chunk_size)
        if not self.writes:
            if written:
                self.state.add_read(out[None], z[None], layer, slot)
            return
        opened = min(len(z), -filled % self.chunk_size)
        whole = opened + (len(z) - opened) // self.chunk_size * self.chunk_size
        if opened:
            self._take(out[:opened], z[:opened], x[:opened], slot, filled, written, layer)
            written = (seen + opened) // self.chunk_size
        if whole > opened:
            self._take_whole(out[opened:whole], z[opened:whole], x[opened:whole], slot, written, layer)
            written += (whole - opened) // self.chunk_size
        if whole < len(z):
            self._take(out[whole:], z[whole:], x[whole:], slot, 0, written, layer)

    def advance_each(
        self, out: Tensor, z: Tensor, x: Tensor, requests: list[tuple[int, int, int]], layer: StreamedLayer
    ) -> None:
        """Reads and writes one token of each of several requests, as `advance` does for one request.

        Args:
            out: the layer's output [N, d]; the reads are added to it in place.
            z: keys [N, r].
            x: target source [N, d].
            requests: per request the token's index in the batch, the slot, and the number of tokens seen.
            layer: the layer whose rule and target generator apply.
        """
        reading = [(place, slot) for place, slot, seen in requests if seen >= self.chunk_size]
        if reading:
            places = torch.tensor([place for place, _ in reading], device=z.device)
            read = self.state.read_each(z[places], [slot for _, slot in reading])
            out.index_add_(0, places, (read * layer.eta).to(out.dtype))
        if not self.writes:
            return
        where = torch.tensor(
            [(place, slot, seen % self.chunk_size) for place, slot, seen in requests], device=z.device
        )
        places, slots, filled = where.unbind(1)
        self.keys[slots, filled], self.sources[slots, filled] = z[places], x[places]
        for _, slot, seen in requests:
            if (seen + 1) % self.chunk_size == 0:
                self._write_open(slot, seen // self.chunk_size, layer)

    def _take(
        self, out: Tensor, z: Tensor, x: Tensor, slot: int, filled: int, written: int, layer: StreamedLayer
    ) -> None:
        """Reads and keeps tokens of the open chunk, and writes it if they complete it."""
        stop = filled + len(z)
        if written:
            self.state.add_read(out[None], z[None], layer, slot, whole=len(z) == self.chunk_size)
        self.keys[slot, filled:stop] = z
        self.sources[slot, filled:stop] = x
        if stop == self.chunk_size:
            self._write_open(slot, written, layer)

    def _write_open(self, slot: int, written: int, layer: StreamedLayer) -> None:
        """Writes the slot's open chunk, which is complete."""
        part = slice(slot, slot + 1)
        after = layer.write(
            self.keys[part], self.sources[part], self._layout(1), self._before(slot, written), reads=False
        )[1]
        self.state.put(slot, after[0])

    def _take_whole(
        self, out: Tensor, z: Tensor, x: Tensor, slot: int, written: int, layer: StreamedLayer
    ) -> None:
        """Reads and writes whole chunks in one call."""
        read, after = layer.write(
            z[None], x[None], self._layout(len(z) // self.chunk_size), self._before(slot, written), reads=True
        )
        out += read[0].to(out.dtype)
        self.state.put(slot, after[0])

    def _before(self, slot: int, written: int) -> Tensor | None:
        return self.state.value[slot : slot + 1] if written else None

    def _layout(self, chunks: int) -> ChunkLayout:
        length = chunks * self.chunk_size
        return ChunkLayout.shared((((0, length),),), length, self.chunk_size)

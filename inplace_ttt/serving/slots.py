"""The fast weights of every slot of one layer, and what a step does to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..layer.stream import StreamedLayer
from ..layout import ChunkLayout
from ..ops import readout, state_dtype
from ..ops.precision import in_range


class Slots:
    """States [slots, ·, r], what reads use of them [slots, d, r], and the open chunks' keys and sources [slots, C, ·].

    How far a request is follows from how many of its tokens were read, so that a slot is lent without being cleared: of what its
    last owner left nothing is read.
    """

    def __init__(self, slots: int, config: InPlaceTTTConfig, d: int, h: int, dtype: torch.dtype, device: torch.device) -> None:
        self.chunk_size, self.damping = config.chunk_size, config.damping
        rows, width = config.state_shape(d, h)
        self.state = torch.zeros(slots, rows, width, dtype=state_dtype(dtype), device=device)
        same = self.damping is None and self.state.dtype == dtype
        self.reads = self.state if same else torch.zeros(slots, d, width, dtype=dtype, device=device)
        self.factor = torch.ones(slots, 1, 1, dtype=self.state.dtype, device=device)
        self.keys = torch.zeros(slots, self.chunk_size, width, dtype=dtype, device=device)
        self.sources = torch.zeros(slots, self.chunk_size, d, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        held = {tensor.data_ptr(): tensor for tensor in (self.state, self.reads, self.keys, self.sources)}
        return sum(tensor[0].nbytes for tensor in held.values())

    def copy(self, source: int, slot: int, seen: int) -> None:
        """Give a slot what another one holds after so many tokens."""
        written, filled = divmod(seen, self.chunk_size)
        if written:
            for tensor in (self.state, self.reads, self.factor):
                tensor[slot] = tensor[source]
        for tensor in (self.keys, self.sources):
            tensor[slot, :filled] = tensor[source, :filled]

    def held(self, slot: int, seen: int) -> dict[str, Tensor]:
        """What a slot holds after so many tokens, as copies in the host's memory: the tensors of a stream of one row."""
        written, filled = divmod(seen, self.chunk_size)
        held = {"counts": torch.tensor([[filled], [written], [seen]])}
        if written:
            held["state"] = self.state[slot : slot + 1]
        if filled:
            held |= {"z": self.keys[slot : slot + 1, :filled], "x": self.sources[slot : slot + 1, :filled]}
        return {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}

    def restore(self, slot: int, held: Mapping[str, Tensor]) -> None:
        """Give a slot what `held` took."""
        if "state" in held:
            self._put(slot, held["state"].to(self.state))
        if "z" in held:
            filled = int(held["counts"][0, 0])
            self.keys[slot, :filled] = held["z"][0, :filled].to(self.keys)
            self.sources[slot, :filled] = held["x"][0, :filled].to(self.sources)

    def advance(self, out: Tensor, z: Tensor, x: Tensor, slot: int, seen: int, layer: StreamedLayer) -> None:
        """Add what one request's tokens read to `out` [n, d] in place and take them in; keys z [n, r], target source x [n, d].

        A token reads the chunks completed before it; a chunk is written when its last token has been read.
        """
        written, filled = divmod(seen, self.chunk_size)
        opened = min(len(z), -filled % self.chunk_size)
        whole = opened + (len(z) - opened) // self.chunk_size * self.chunk_size
        if opened:
            written += self._take(out[:opened], z[:opened], x[:opened], slot, filled, written, layer)
        if whole > opened:
            self._take_whole(out[opened:whole], z[opened:whole], x[opened:whole], slot, written, layer)
            written += (whole - opened) // self.chunk_size
        if whole < len(z):
            self._take(out[whole:], z[whole:], x[whole:], slot, 0, written, layer)

    def advance_each(self, z: Tensor, x: Tensor, places: list[tuple[int, int]], layer: StreamedLayer) -> Tensor:
        """As `advance` for many requests with one token each: what keys z [n, r] read, [n, d]; target source x [n, d].

        places: the slot of each, and how many tokens were seen before.
        """
        slots = torch.tensor([slot for slot, _ in places], device=z.device)
        written = torch.tensor([seen >= self.chunk_size for _, seen in places], device=z.device)
        read = self._read_each(z.to(self.reads.dtype), places, slots) * (layer.eta * self.factor[slots, 0])
        filled = torch.tensor([seen % self.chunk_size for _, seen in places], device=z.device)
        self.keys[slots, filled], self.sources[slots, filled] = z, x
        for slot, seen in places:
            if (seen + 1) % self.chunk_size == 0:
                self._write_open(slot, seen // self.chunk_size, layer)
        return torch.where(written[:, None], read, 0)

    def _read_each(self, z: Tensor, places: list[tuple[int, int]], slots: Tensor) -> Tensor:
        """What key z[i] reads in slot i; of a slot in which nothing is written yet, whatever another left there.

        One product, except on a CPU, which reads that many matrices faster one by one.
        """
        if z.device.type == "cpu":
            nothing = z.new_zeros(self.reads.shape[1])
            read = zip(z, places, strict=True)
            return torch.stack([torch.mv(self.reads[slot], key) if seen >= self.chunk_size else nothing for key, (slot, seen) in read])
        return torch.bmm(self.reads[slots], z[:, :, None])[..., 0]

    def _take(self, out: Tensor, z: Tensor, x: Tensor, slot: int, filled: int, written: int, layer: StreamedLayer) -> bool:
        """Tokens of the open chunk; whether they complete it."""
        if written:
            read = z.to(out.dtype) @ self.reads[slot].mT
            out += (read * (layer.eta * self.factor[slot])).to(out.dtype)
        stop = filled + len(z)
        self.keys[slot, filled:stop] = z
        self.sources[slot, filled:stop] = x
        if stop == self.chunk_size:
            self._write_open(slot, written, layer)
        return stop == self.chunk_size

    def _write_open(self, slot: int, written: int, layer: StreamedLayer) -> None:
        """The slot's open chunk is complete."""
        state = self.state[slot : slot + 1] if written else None
        self._put(slot, layer.write(self.keys[slot : slot + 1], self.sources[slot : slot + 1], self._layout(1), state, reads=False)[1])

    def _take_whole(self, out: Tensor, z: Tensor, x: Tensor, slot: int, written: int, layer: StreamedLayer) -> None:
        """Whole chunks, in one call."""
        state = self.state[slot : slot + 1] if written else None
        read, after = layer.write(z[None], x[None], self._layout(len(z) // self.chunk_size), state, reads=True)
        out += read[0].to(out.dtype)
        self._put(slot, after)

    def _put(self, slot: int, state: Tensor) -> None:
        self.state[slot] = state[0]
        if self.reads is not self.state:
            reads, factor = in_range(readout(state[0], self.damping), self.reads.dtype)
            self.reads[slot] = reads
            self.factor[slot] = 1 if factor is None else factor

    def _layout(self, chunks: int) -> ChunkLayout:
        length = chunks * self.chunk_size
        return ChunkLayout.shared((((0, length),),), length, self.chunk_size)

"""A small writer in the place of a layer, and a memory that keeps every token."""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inplace_ttt.layer.stream import FastWeightStream
from inplace_ttt.layout import ChunkLayout, Span
from inplace_ttt.ops import state_dtype

CHUNK, H, D, ETA = 4, 5, 3, 0.5


@dataclass
class SmallWriter:
    """Delta of a chunk in which the order of the tokens matters."""

    chunk_size: int = CHUNK
    eta: float = ETA
    chunks: list[Tensor] = field(default_factory=list)

    def write(
        self, z: Tensor, x: Tensor, layout: ChunkLayout, state: Tensor | None, *, reads: bool
    ) -> tuple[Tensor, Tensor]:
        state = torch.zeros(len(z), D, H) if state is None else state.clone()
        read = torch.zeros(len(z), z.shape[1], D)
        for row, documents in enumerate(layout.documents):
            for start, stop in itertools.chain.from_iterable(map(layout.chunks, documents)):
                read[row, start:stop] = (
                    self.eta * (z[row, start:stop].float() @ state[row].T) if reads else torch.nan
                )
                assert stop - start == self.chunk_size
                self.chunks.append(z[row, start:stop].clone())
                state[row] += delta(z[row, start:stop], x[row, start:stop])
        return read.to(z.dtype), state


def delta(z: Tensor, x: Tensor) -> Tensor:
    accurate = state_dtype(z.dtype)
    return (x.to(accurate) * torch.arange(1, len(x) + 1)[:, None]).T @ z.to(accurate)


class KeepsEverything:
    """The same memory, naively: all positions of every row, None for padding; S is summed up anew whenever it
    is read."""

    def __init__(self, batch: int) -> None:
        self.rows: list[list[tuple[Tensor, Tensor] | None]] = [[] for _ in range(batch)]

    def tokens(self, row: int) -> list[tuple[Tensor, Tensor]]:
        return [position for position in self.rows[row] if position is not None]

    def state(self, row: int) -> Tensor:
        tokens = self.tokens(row)
        total = torch.zeros(D, H)
        for first in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
            zs, xs = zip(*tokens[first : first + CHUNK], strict=True)
            total = total + delta(torch.stack(zs), torch.stack(xs))
        return total

    def advance(self, out: Tensor, z: Tensor, x: Tensor, spans: list[Span]) -> Tensor:
        out = out.float()
        for row, (start, stop) in enumerate(spans):
            for t in range(z.shape[1]):
                if start <= t < stop:
                    out[row, t] += ETA * (self.state(row) @ z[row, t].float())
                    self.rows[row].append((z[row, t], x[row, t]))
                else:
                    self.rows[row].append(None)
        return out

    def crop(self, tokens: int) -> None:
        self.rows = [row[: max(len(row) - tokens, 0)] for row in self.rows]

    def select(self, rows: list[int]) -> None:
        self.rows = [list(self.rows[row]) for row in rows]


def inputs(
    batch: int, length: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """out, z, x of one call."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, length, size, generator=generator).to(dtype) for size in (D, H, D))  # type: ignore[return-value]


def read(stream: FastWeightStream, length: int, seed: int, writer: SmallWriter | None = None) -> Tensor:
    """Advance every row by `length` tokens made from `seed`."""
    out, z, x = inputs(stream.batch, length, seed=seed)
    return stream.advance(out, z, x, [(0, length)] * stream.batch, writer or SmallWriter())


def state_of(stream: FastWeightStream, row: int) -> Tensor:
    return torch.zeros(D, H) if stream.state is None else stream.state[row]

"""Which token belongs to which chunk of which document. Pure bookkeeping: knows no model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import InPlaceTTTError

Span = tuple[int, int]
"""Half-open range of token positions in a row."""


def document_starts(position_ids: Tensor) -> Tensor:
    """Where documents start in packed rows [B, T], bool: wherever the position is not the previous one plus
    1."""
    return torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy of host memory that every stream may read; on a GPU the host waits for the copy alone, not for
    the queued work."""
    if device.type != "cuda":
        return host.to(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        copy = host.pin_memory().to(device, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    copy.record_stream(torch.cuda.current_stream(device))
    return copy


@dataclass(frozen=True)
class ChunkLayout:
    """The documents of a batch [B, T] and their grid of chunks.

    A document is cut into chunks of `chunk_size` tokens from its own first token; its last chunk may be
    short. Tokens outside every document are padding and belong to no chunk.

    documents: for each row, the spans of its documents, in order.
    length: T, tokens a row, padding included.
    spans: the same documents as int64 [n, 3] on the CPU: row, start and stop.
    """

    documents: tuple[tuple[Span, ...], ...]
    length: int
    chunk_size: int
    spans: Tensor = field(init=False, repr=False, compare=False)
    _chunk_ids: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise InPlaceTTTError(f"chunk_size must be at least 1, got {self.chunk_size}.")
        for row, spans in enumerate(self.documents):
            end = 0
            for start, stop in spans:
                if not end <= start < stop <= self.length:
                    raise InPlaceTTTError(
                        f"row {row} has document {start}:{stop}, which is empty, overlaps, or leaves "
                        f"0:{self.length}."
                    )
                end = stop
        rows = [(row, start, stop) for row, spans in enumerate(self.documents) for start, stop in spans]
        object.__setattr__(self, "spans", torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3))

    @classmethod
    @functools.lru_cache(maxsize=16)
    def shared(cls, documents: tuple[tuple[Span, ...], ...], length: int, chunk_size: int) -> ChunkLayout:
        """The layout, one object for all who ask for these documents: its tensors reach a device once, not
        once a layer."""
        with torch.inference_mode(False):
            return cls(documents, length, chunk_size)

    @property
    def batch(self) -> int:
        return len(self.documents)

    def chunks(self, document: Span) -> Iterator[Span]:
        """The chunks of a document, in order."""
        start, stop = document
        for first in range(start, stop, self.chunk_size):
            yield first, min(first + self.chunk_size, stop)

    def is_complete(self, chunk: Span) -> bool:
        return chunk[1] - chunk[0] == self.chunk_size

    def writes(self) -> int:
        """Chunks whose delta a later token of the same document reads; 0 means that nothing here can learn to
        write."""
        return sum((stop - start - 1) // self.chunk_size for row in self.documents for start, stop in row)

    def chunk_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """int32 [B, T]: a number for each chunk, unique in its row, and -1 for padding."""
        device = torch.device(device)
        if device not in self._chunk_ids:
            ids = torch.full((self.batch, self.length), -1, dtype=torch.int32)
            for row, spans in enumerate(self.documents):
                count = 0
                for start, stop in spans:
                    ids[row, start:stop] = (
                        count + torch.arange(stop - start, dtype=torch.int32) // self.chunk_size
                    )
                    count += -(-(stop - start) // self.chunk_size)
            self._chunk_ids[device] = on_device(ids, device)
        return self._chunk_ids[device]

    @functools.lru_cache(maxsize=64)  # noqa: B019 (layouts are small, and few are held)
    def part(self, rank: int, ranks: int) -> ChunkLayout:
        """Rank `rank`'s slice of T / `ranks` tokens, whose first and last document may go on beyond it.

        Raises InPlaceTTTError, on every rank alike, where a border between ranks would cut a chunk in two.
        """
        if self.length % ranks:
            raise InPlaceTTTError(
                f"rows of {self.length} tokens do not divide by {ranks} ranks; pad them to a multiple of it."
            )
        width = self.length // ranks
        for border, (row, spans) in itertools.product(
            range(width, self.length, width), enumerate(self.documents)
        ):
            for start, stop in spans:
                if start < border < stop and (border - start) % self.chunk_size:
                    raise InPlaceTTTError(
                        f"rank {border // width} begins at token {border} of row {row}, "
                        f"{(border - start) % self.chunk_size} tokens into a "
                        f"chunk of {self.chunk_size}; let documents start on multiples of the chunk, and T "
                        f"/ ranks = {width} be one."
                    )
        first, last = rank * width, (rank + 1) * width
        rows = (
            tuple(
                (max(start, first) - first, min(stop, last) - first)
                for start, stop in spans
                if start < last and stop > first
            )
            for spans in self.documents
        )
        return ChunkLayout(tuple(rows), width, self.chunk_size)

    def links(self, ranks: int) -> Tensor:
        """Whose writes each rank starts from, as 0 and 1, float64 [B, ranks + 1, ranks + 1].

        Row r is rank r's state at its first document's first token, the last row the state after each row's
        last document; column 0 is the initial state, column r + 1 the sum of rank r's writes in its last
        document.
        """
        width = self.length // ranks
        links = torch.zeros(self.batch, ranks + 1, ranks + 1, dtype=torch.float64)
        for row, spans in enumerate(self.documents):
            if not spans:
                links[row, :, 0] = 1  # a row of padding hands its state on
            for number, (start, stop) in enumerate(spans):
                writers = range(start // width, -(-stop // width))
                # the document goes on there, or starts from a state
                readers = [r for r in writers if start < r * width or number == 0]
                if number == len(spans) - 1:
                    readers.append(ranks)
                for reader in readers:
                    links[row, reader, 0] = number == 0
                    for writer in writers:
                        links[row, reader, writer + 1] = writer < reader
        return links

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], chunk_size: int, length: int | None = None
    ) -> ChunkLayout:
        """Documents of the given lengths back to back in each row; what is left of `length` is padding."""
        rows = []
        for row in lengths:
            ends = [0]
            for n in row:
                ends.append(ends[-1] + n)
            rows.append(tuple(itertools.pairwise(ends)))
        longest = max((row[-1][1] for row in rows if row), default=0)
        return cls(tuple(rows), longest if length is None else length, chunk_size)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, chunk_size: int) -> ChunkLayout:
        """Packed rows [B, T], see `document_starts`."""
        length = position_ids.shape[1]
        rows = []
        for row in document_starts(position_ids).tolist():
            first = [t for t, is_start in enumerate(row) if is_start]
            rows.append(tuple(zip(first, [*first[1:], length], strict=True)))
        return cls(tuple(rows), length, chunk_size)

    @classmethod
    def from_attention_mask(cls, mask: Tensor, chunk_size: int) -> ChunkLayout:
        """One document a row [B, T], where the mask is not 0; padding may stand at the left, the right, or
        both."""
        rows = []
        real, length = mask != 0, mask.shape[1]
        first = real.int().argmax(dim=1).tolist()
        count = real.sum(dim=1).tolist()
        last = (length - real.flip(1).int().argmax(dim=1)).tolist()
        for row, (start, n, stop) in enumerate(zip(first, count, last, strict=True)):
            if n and stop - start != n:
                raise InPlaceTTTError(
                    f"row {row} has padding between tokens {start} and {stop}; pad at the left or the "
                    "right only."
                )
            rows.append(((start, stop),) if n else ())
        return cls(tuple(rows), length, chunk_size)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, chunk_size: int, length: int | None = None) -> ChunkLayout:
        """One packed row; `cu_seqlens` [documents + 1] are the documents' cumulative lengths, from 0."""
        ends = cu_seqlens.tolist()
        if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
            raise InPlaceTTTError(
                f"cu_seqlens must rise from 0 and hold at least two numbers, got {ends[:8]}."
            )
        spans = tuple((a, b) for a, b in itertools.pairwise(ends) if b > a)
        return cls((spans,), ends[-1] if length is None else length, chunk_size)

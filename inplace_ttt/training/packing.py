"""Documents laid one after another into rows of fixed length, their boundaries kept. Pure: token ids in, token ids out.

Every piece of a document that lands in a row is a document of its own there: its positions start at 0 and its first label
is -100, so that nothing is predicted across a border. What is left of a row is a document too, of padding that is never
predicted; attention and fast weight keep it apart as they keep any two documents apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..tasks import IGNORED

if TYPE_CHECKING:
    import numpy as np


class Piece(NamedTuple):
    """Tokens start:stop of document number `document`, standing at `at` in their row."""

    document: int
    start: int
    stop: int
    at: int


def lay_out(lengths: Iterable[int], row_length: int, align: int = 1) -> Iterator[list[Piece]]:
    """The pieces of each row. Documents start on multiples of `align`, which divides row_length; empty ones are left out.

    Takes the next length only when the row has room for it.
    """
    assert row_length % align == 0
    row: list[Piece] = []
    at = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + row_length - at)
            row.append(Piece(document, start, stop, at))
            at += -(-(stop - start) // align) * align
            start = stop
            if at == row_length:
                yield row
                row, at = [], 0
    if row:
        yield row


def pack(documents: Iterable[Sequence[int]], row_length: int, pad_token: int, align: int = 1) -> Iterator[dict[str, np.ndarray]]:
    """Rows of input_ids, position_ids and labels, int32 [row_length] each; holds no more documents than one row has.

    Labels are not shifted: transformers shifts them.
    """
    return (row for _, row in pack_pieces(documents, row_length, pad_token, align))


def pack_pieces(
    documents: Iterable[Sequence[int]], row_length: int, pad_token: int, align: int = 1
) -> Iterator[tuple[list[Piece], dict[str, np.ndarray]]]:
    """The same rows, each with what stands in it. When a row comes, no document beyond its last was taken."""
    held: dict[int, Sequence[int]] = {}

    def lengths() -> Iterator[int]:
        for number, tokens in enumerate(documents):
            held[number] = tokens
            yield len(tokens)

    for row in lay_out(lengths(), row_length, align):
        yield row, _fill(row, held, row_length, pad_token, align)
        for number in [number for number in held if number < row[-1].document]:
            del held[number]


def _fill(row: list[Piece], documents: dict[int, Sequence[int]], row_length: int, pad_token: int, align: int) -> dict[str, np.ndarray]:
    """One row. Padding restarts on the grid of `align`, so that a chunk of padding crosses no border of the grid either."""
    import numpy as np

    ids = np.full(row_length, pad_token, dtype=np.int32)
    labels = np.full(row_length, IGNORED, dtype=np.int32)
    starts = np.zeros(row_length, dtype=np.int32)
    for document, start, stop, at in row:
        end = at + stop - start
        ids[at:end] = documents[document][start:stop]
        labels[at + 1 : end] = ids[at + 1 : end]
        starts[at:end] = at
        next_start = -(-end // align) * align
        starts[end:next_start] = end
        starts[next_start:] = next_start
    return {"input_ids": ids, "position_ids": np.arange(row_length, dtype=np.int32) - starts, "labels": labels}


@dataclass
class PackingCounts:
    """What packing makes of documents of given lengths, for chunks of `chunk_size` tokens.

    long_tokens: those in pieces longer than one chunk, which alone train the target generator.
    writes: chunks whose delta a later token of the same piece reads. chunks: pieces by their number of chunks.
    """

    chunk_size: int
    rows: int = 0
    tokens: int = 0
    long_tokens: int = 0
    writes: int = 0
    chunks: Counter[int] = field(default_factory=Counter)

    def add(self, row: list[Piece]) -> None:
        self.rows += 1
        for _, start, stop, _ in row:
            count = -(-(stop - start) // self.chunk_size)
            self.chunks[count] += 1
            self.tokens += stop - start
            self.writes += count - 1
            self.long_tokens += stop - start if count > 1 else 0

    @property
    def pieces(self) -> int:
        return self.chunks.total()

    @property
    def median_chunks(self) -> int:
        """The lower median of chunks a piece."""
        seen = 0
        for count in sorted(self.chunks):
            seen += self.chunks[count]
            if 2 * seen >= self.pieces:
                return count
        return 0


def count(lengths: Iterable[int], row_length: int, chunk_size: int, align: int = 1) -> PackingCounts:
    """The counts of `pack` over documents of these lengths, without their tokens."""
    counts = PackingCounts(chunk_size)
    for row in lay_out(lengths, row_length, align):
        counts.add(row)
    return counts

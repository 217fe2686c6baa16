"""Documents laid one after another into rows of fixed length, their boundaries kept. Pure: token ids in,
token ids out.

Every piece of a document that lands in a row is a document of its own there: its positions start at 0 and its
first label is -100, so that nothing is predicted across a border. Where a document begins with special tokens
(a BOS), each of its pieces does: a model that was trained with them reads much worse without, and writes
would learn to make up for it. What is left of a row is a document too, of padding that is never predicted;
attention and fast weight keep it apart as they keep any two documents apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ...tasks import IGNORED

if TYPE_CHECKING:
    import numpy as np


class Piece(NamedTuple):
    """Tokens start:stop of document number `document`, behind its first `lead` ones, which stand at `at` in
    their row."""

    document: int
    start: int
    stop: int
    at: int
    lead: int = 0

    @property
    def length(self) -> int:
        return self.lead + self.stop - self.start


class Size(NamedTuple):
    """Of a document: its tokens, and how many of the first are special ones that begin every text."""

    length: int
    lead: int = 0


def lay_out(sizes: Iterable[Size], row_length: int, align: int = 1, used: int = 0) -> Iterator[list[Piece]]:
    """The pieces of each row. Documents start on multiples of `align`, which divides row_length; empty ones
    are left out.

    used: tokens of the first document that stand in earlier rows. Takes the next size only when the row has
        room for it.
    """
    assert row_length % align == 0
    row: list[Piece] = []
    at = 0
    for document, (length, lead) in enumerate(sizes):
        start = 0 if document else used
        while start < length:
            again = lead if start and lead < row_length else 0
            stop = min(length, start + row_length - at - again)
            row.append(Piece(document, start, stop, at, again))
            at += -(-row[-1].length // align) * align
            start = stop
            if at == row_length:
                yield row
                row, at = [], 0
    if row:
        yield row


def lead_of(tokens: Sequence[int], begins: Sequence[int]) -> int:
    """How many of a document's first tokens are the special ones that begin every text."""
    return len(begins) if list(tokens[: len(begins)]) == list(begins) else 0


def pack(
    documents: Iterable[Sequence[int]],
    row_length: int,
    pad_token: int,
    align: int = 1,
    begins: Sequence[int] = (),
    used: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Rows of input_ids, position_ids and labels, int32 [row_length] each; holds no more documents than one
    row has.

    begins: special tokens that begin every text, as `begins_of` has them. used: tokens of the first document
        in earlier rows. Labels
    are not shifted: transformers shifts them.
    """
    return (row for _, row in pack_pieces(documents, row_length, pad_token, align, begins, used))


def pack_pieces(
    documents: Iterable[Sequence[int]],
    row_length: int,
    pad_token: int,
    align: int = 1,
    begins: Sequence[int] = (),
    used: int = 0,
) -> Iterator[tuple[list[Piece], dict[str, np.ndarray]]]:
    """The same rows, each with what stands in it. When a row comes, no document beyond its last was taken."""
    held: dict[int, Sequence[int]] = {}

    def sizes() -> Iterator[Size]:
        for number, tokens in enumerate(documents):
            held[number] = tokens
            yield Size(len(tokens), lead_of(tokens, begins))

    for row in lay_out(sizes(), row_length, align, used):
        yield row, _fill(row, held, row_length, pad_token, align)
        for number in [number for number in held if number < row[-1].document]:
            del held[number]


def _fill(
    row: list[Piece], documents: dict[int, Sequence[int]], row_length: int, pad_token: int, align: int
) -> dict[str, np.ndarray]:
    """One row. Padding restarts on the grid of `align`, so that a chunk of padding crosses no border of the
    grid either."""
    import numpy as np

    ids = np.full(row_length, pad_token, dtype=np.int32)
    labels = np.full(row_length, IGNORED, dtype=np.int32)
    starts = np.zeros(row_length, dtype=np.int32)
    for piece in row:
        at, end, tokens = piece.at, piece.at + piece.length, documents[piece.document]
        ids[at : at + piece.lead] = tokens[: piece.lead]
        ids[at + piece.lead : end] = tokens[piece.start : piece.stop]
        labels[at + 1 : end] = ids[at + 1 : end]
        starts[at:end] = at
        next_start = -(-end // align) * align
        starts[end:next_start] = end
        starts[next_start:] = next_start
    return {
        "input_ids": ids,
        "position_ids": np.arange(row_length, dtype=np.int32) - starts,
        "labels": labels,
    }


@dataclass
class PackingCounts:
    """What packing makes of documents of given lengths, for chunks of `chunk_size` tokens.

    long_tokens: those in pieces longer than one chunk, which alone train the target generator.
    writes: chunks whose delta a later token of the same piece reads. chunks: pieces by their number of
        chunks.
    """

    chunk_size: int
    rows: int = 0
    tokens: int = 0
    long_tokens: int = 0
    writes: int = 0
    chunks: Counter[int] = field(default_factory=Counter)

    def add(self, row: list[Piece]) -> None:
        self.rows += 1
        for piece in row:
            count = -(-piece.length // self.chunk_size)
            self.chunks[count] += 1
            self.tokens += piece.length
            self.writes += count - 1
            self.long_tokens += piece.length if count > 1 else 0

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


def count(sizes: Iterable[Size], row_length: int, chunk_size: int, align: int = 1) -> PackingCounts:
    """The counts of `pack` over documents of these sizes, without their tokens."""
    counts = PackingCounts(chunk_size)
    for row in lay_out(sizes, row_length, align):
        counts.add(row)
    return counts

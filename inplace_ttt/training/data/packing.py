"""Packs documents, one after another, into rows of fixed length, and keeps their boundaries.

The input and the output are token ids. Each piece of a document in a row is treated as a document of its own.
Its positions start at 0 and its first label is -100, so that nothing is predicted across a border.

If a document begins with special tokens (a BOS), so does each of its pieces. A model that was trained with
these tokens reads much worse without them, and the writes would learn to compensate.

The rest of a row is a document of padding, which is never predicted. Attention and fast weights treat it
as a separate document.
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
    """A piece of a document in a row: the document's first `lead` tokens, then its tokens start:stop.

    Attributes:
        document: number of the document.
        start: first token of the piece.
        stop: token after the last one of the piece.
        at: position of the piece in its row.
        lead: number of the document's first tokens that are repeated before the piece.
    """

    document: int
    start: int
    stop: int
    at: int
    lead: int = 0

    @property
    def length(self) -> int:
        return self.lead + self.stop - self.start


class Size(NamedTuple):
    """The number of a document's tokens, and of the special tokens that begin it (`lead`)."""

    length: int
    lead: int = 0


def lay_out(sizes: Iterable[Size], row_length: int, align: int = 1, used: int = 0) -> Iterator[list[Piece]]:
    """Yields the pieces of each row. Empty documents are left out.

    It takes the next size from `sizes` only when the row has room.

    Args:
        sizes: size of each document.
        row_length: tokens per row.
        align: documents start on multiples of this many tokens. It divides `row_length`.
        used: number of the first document's tokens that are in earlier rows.
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
    """Returns the number of special tokens at the start of a document: all of `begins`, or 0."""
    return len(begins) if list(tokens[: len(begins)]) == list(begins) else 0


def pack(
    documents: Iterable[Sequence[int]],
    row_length: int,
    pad_token: int,
    align: int = 1,
    begins: Sequence[int] = (),
    used: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields packed rows. It holds only the documents of one row at a time.

    Args:
        documents: token ids of each document.
        row_length: tokens per row.
        pad_token: id that fills up a row.
        align: documents start on multiples of this many tokens.
        begins: special tokens that begin every text, as `begins_of` returns them.
        used: number of the first document's tokens that are in earlier rows.

    Yields:
        `input_ids`, `position_ids` and `labels`, int32 [row_length] each. The labels are not shifted,
        because transformers shifts them.
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
    """Yields the same rows as `pack`, each with its pieces.

    When it yields a row, it has not yet read beyond that row's last document.
    """
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
    """Returns one row. Padding starts anew at the next multiple of `align`, so its chunks are aligned too."""
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
    """Counts over packed rows, for chunks of `chunk_size` tokens.

    Attributes:
        chunk_size: tokens per chunk.
        rows: number of rows.
        tokens: tokens of documents, without padding.
        long_tokens: tokens in pieces longer than one chunk. Only these train the target generator.
        writes: chunks whose write is read by a later token of the same piece.
        chunks: number of chunks -> number of pieces with so many chunks.
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
        """The lower median of the chunks per piece."""
        seen = 0
        for count in sorted(self.chunks):
            seen += self.chunks[count]
            if 2 * seen >= self.pieces:
                return count
        return 0


def count(sizes: Iterable[Size], row_length: int, chunk_size: int, align: int = 1) -> PackingCounts:
    """Returns the counts of `pack` over documents of these sizes. It needs no tokens."""
    counts = PackingCounts(chunk_size)
    for row in lay_out(sizes, row_length, align):
        counts.add(row)
    return counts

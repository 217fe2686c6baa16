"""The host's plan of a call. It lists the documents for the walk, and the tokens that only read W0.

A walk is a loop over a document's chunks with a running sum (`walk`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

_LONGEST_PIECE = 4096
"""Largest number of tokens outside the walked documents that one program processes for W0's gradient."""


@dataclass(frozen=True)
class Document:
    """A walked document: tokens start:stop of the flat batch [B · T], in `row`, with chunks counted from 0.

    Attributes:
        row: Row of the batch.
        start: First token.
        stop: End, exclusive.
        chunk: Tokens per chunk.
        begins: True if the document starts from the row's initial state.
        ends: True if the state after its last write is returned.
    """

    row: int
    start: int
    stop: int
    chunk: int
    begins: bool
    ends: bool

    @property
    def chunks(self) -> int:
        return -(-(self.stop - self.start) // self.chunk)

    @property
    def writes(self) -> int:
        """The number of leading chunks whose delta something reads."""
        complete = (self.stop - self.start) // self.chunk
        return complete if self.ends else max(min(complete, self.chunks - 1), 0)

    @property
    def read_from(self) -> int:
        """The first chunk that reads more than W0."""
        return 0 if self.begins else min(1, self.chunks)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Returns the tokens of chunks first:last."""
        return min(self.start + first * self.chunk, self.stop), min(self.start + last * self.chunk, self.stop)


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of all calls of one kind over the same documents.

    Caches of derived tables use the object's identity as their key.

    Attributes:
        batch: Rows B.
        chunk: Tokens per chunk.
        documents: The walked documents in order. A row that has a state but no document has an empty one
            here.
        short: The documents that use the dual form.
        plain: Merged spans whose product with W0 no walk computes.
        outside: Spans outside the walked documents, in pieces.
    """

    batch: int
    chunk: int
    documents: tuple[Document, ...]
    short: tuple[Document, ...]
    plain: tuple[tuple[int, int], ...]
    outside: tuple[tuple[int, int], ...]

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """The index of each walked document's first write among the call's writes, then their total."""
        numbers = [0]
        for document in self.documents:
            numbers.append(numbers[-1] + document.writes)
        return tuple(numbers)


def plan_of(
    spans: Tensor, batch: int, length: int, chunk: int, longest: int, has_start: bool, hands_on: bool
) -> Plan:
    """Returns the plan for the documents `spans` [n, 3] int64 on the CPU: row, start, stop, in order.

    A document of at most `longest` tokens is short, unless it starts from a state or its last state is
    returned.
    """
    return _plan(tuple(map(tuple, spans.tolist())), batch, length, chunk, longest, has_start, hands_on)


@functools.lru_cache(maxsize=64)
def _plan(
    spans: tuple[tuple[int, int, int], ...],
    batch: int,
    length: int,
    chunk: int,
    longest: int,
    has_start: bool,
    hands_on: bool,
) -> Plan:
    documents: list[Document] = []
    short: list[Document] = []
    for number, (row, start, stop) in enumerate(spans):
        is_first = number == 0 or spans[number - 1][0] != row
        is_last = number == len(spans) - 1 or spans[number + 1][0] != row
        begins, ends = has_start and is_first, hands_on and is_last
        if stop - start > chunk or begins or ends:
            is_short = stop - start <= longest and not begins and not ends
            kind = short if is_short else documents
            kind.append(Document(row, row * length + start, row * length + stop, chunk, begins, ends))
    read = [document.span(document.read_from, document.chunks) for document in documents]
    plain = _gaps(read, batch * length)
    outside = _gaps([(document.start, document.stop) for document in documents], batch * length)
    empty = sorted({*range(batch)} - {row for row, _, _ in spans}) if hands_on or has_start else []
    documents += [Document(row, 0, 0, chunk, has_start, hands_on) for row in empty]
    return Plan(batch, chunk, tuple(documents), tuple(short), tuple(plain), tuple(_pieces(outside, chunk)))


def _gaps(spans: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of 0:length outside the spans, which are in order."""
    done = 0
    for start, stop in (*spans, (length, length)):
        if done < start:
            yield done, start
        done = max(done, stop)


def _pieces(spans: Iterator[tuple[int, int]], chunk: int) -> Iterator[tuple[int, int]]:
    """Splits the spans into pieces of complete chunks. Several programs then share a long span."""
    longest = max(_LONGEST_PIECE // chunk, 1) * chunk
    for start, stop in spans:
        yield from ((first, min(first + longest, stop)) for first in range(start, stop, longest))

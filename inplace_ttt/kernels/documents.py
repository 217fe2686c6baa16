"""The host's plan of a call: which documents are walked, which tokens only read W0."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

_LONGEST_PIECE = 4096
"""Tokens outside of the walked documents that one program goes through for W0's gradient, before another
takes over."""


@dataclass(frozen=True)
class Document:
    """A walked document: tokens start:stop of the flat batch [B · T], in `row`; its chunks, counted from 0.

    begins: it starts from the row's initial state. ends: its last state is handed on. writes: the first
        chunks, whose
    delta something reads. read_from: the first chunk that reads more than W0.
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
        complete = (self.stop - self.start) // self.chunk
        return complete if self.ends else max(min(complete, self.chunks - 1), 0)

    @property
    def read_from(self) -> int:
        return 0 if self.begins else min(1, self.chunks)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The tokens of chunks first:last."""
        return min(self.start + first * self.chunk, self.stop), min(self.start + last * self.chunk, self.stop)


@dataclass(frozen=True, eq=False)
class Plan:
    """One object for all calls of a kind over the same documents, which caches know it by.

    documents: the walked ones, in order, an empty one for a row without any that has a state; short: those
        that take the
    dual form. plain: spans whose product with W0 no walk makes, merged. outside: those of no walked document,
    in pieces."""

    batch: int
    chunk: int
    documents: tuple[Document, ...]
    short: tuple[Document, ...]
    plain: tuple[tuple[int, int], ...]
    outside: tuple[tuple[int, int], ...]

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """The number of each walked document's first write among those of the call."""
        numbers = [0]
        for document in self.documents:
            numbers.append(numbers[-1] + document.writes)
        return tuple(numbers)


def plan_of(
    spans: Tensor, batch: int, length: int, chunk: int, longest: int, has_start: bool, hands_on: bool
) -> Plan:
    """The plan for the documents `spans` [n, 3] int64 on the CPU: row, start, stop, in order.

    longest: the tokens up to which a document is short. One that starts from a state or hands it on is
        walked.
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
    """What is left of 0:length without the spans, which are in order."""
    done = 0
    for start, stop in (*spans, (length, length)):
        if done < start:
            yield done, start
        done = max(done, stop)


def _pieces(spans: Iterator[tuple[int, int]], chunk: int) -> Iterator[tuple[int, int]]:
    """The spans in pieces of whole chunks, so that several programs share a long one."""
    longest = max(_LONGEST_PIECE // chunk, 1) * chunk
    for start, stop in spans:
        yield from ((first, min(first + longest, stop)) for first in range(start, stop, longest))

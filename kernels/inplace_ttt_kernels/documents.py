"""The host's plan of a call: which documents are walked, which tokens only read W0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor


@dataclass(frozen=True)
class Document:
    """A walked document: tokens start:stop of the flat batch [B · T], in `row`; its chunks, counted from 0.

    begins: it starts from the row's initial state. ends: its last state is handed on. writes: the first chunks, whose
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
        return complete if self.ends else min(complete, self.chunks - 1)

    @property
    def read_from(self) -> int:
        return 0 if self.begins else 1

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The tokens of chunks first:last."""
        return min(self.start + first * self.chunk, self.stop), min(self.start + last * self.chunk, self.stop)


@dataclass(frozen=True)
class Group:
    """Slots first : first + count of a walk, filled by one launch: `steps` steps after the `done` ones.

    lead: the first slot holds what the walk starts from, before any step.
    """

    first: int
    count: int
    lead: bool
    done: int
    steps: int
    is_last: bool


def groups(slots: int, room: int, lead: bool, steps: int) -> Iterator[Group]:
    """A walk of `steps` steps that fills `slots` slots, at most `room` at once; a step each, and none for a lead."""
    first = done = 0
    while True:
        count = min(room, slots - first)
        is_last = first + count == slots
        leads = lead and first == 0
        here = steps - done if is_last else count - leads
        yield Group(first, count, leads, done, here, is_last)
        if is_last:
            return
        first, done = first + count, done + here


@dataclass(frozen=True)
class Plan:
    """documents: the walked ones, in order; short: those that take the dual form. plain: spans whose product with W0 no walk
    makes, merged. outside: those of no walked document."""

    documents: tuple[Document, ...]
    short: tuple[Document, ...]
    plain: tuple[tuple[int, int], ...]
    outside: tuple[tuple[int, int], ...]
    rows_without: tuple[int, ...]


def plan_of(spans: Tensor, batch: int, length: int, chunk: int, longest: int, has_start: bool, hands_on: bool) -> Plan:
    """The plan for the documents `spans` [n, 3] int64 on the CPU: row, start, stop, in order.

    longest: the tokens up to which a document is short. One that starts from a state or hands it on is walked.
    """
    return _plan(tuple(map(tuple, spans.tolist())), batch, length, chunk, longest, has_start, hands_on)


@lru_cache(maxsize=64)
def _plan(
    spans: tuple[tuple[int, int, int], ...], batch: int, length: int, chunk: int, longest: int, has_start: bool, hands_on: bool
) -> Plan:
    documents, short = [], []
    for number, (row, start, stop) in enumerate(spans):
        is_first = number == 0 or spans[number - 1][0] != row
        is_last = number == len(spans) - 1 or spans[number + 1][0] != row
        begins, ends = has_start and is_first, hands_on and is_last
        if stop - start > chunk or begins or ends:
            is_short = stop - start <= longest and not begins and not ends
            kind = short if is_short else documents
            kind.append(Document(row, row * length + start, row * length + stop, chunk, begins, ends))
    read = [document.span(document.read_from, document.chunks) for document in documents]
    return Plan(
        tuple(documents),
        tuple(short),
        tuple(_gaps(read, batch * length)),
        tuple(_gaps([(document.start, document.stop) for document in documents], batch * length)),
        tuple(sorted({*range(batch)} - {row for row, _, _ in spans})),
    )


def _gaps(spans: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """What is left of 0:length without the spans, which are in order."""
    done = 0
    for start, stop in (*spans, (length, length)):
        if done < start:
            yield done, start
        done = max(done, stop)

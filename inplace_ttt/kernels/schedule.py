"""Divides a call's walk into launches, and builds the tables in which the kernels find their work.

The slots of a call are filled in groups, each as large as the memory limit allows. One launch fills a group,
which may include any number of documents. The products that read the group run before the next launch
overwrites it. A document that is split between groups continues from a sum in memory. The tables are copied
to the device once per plan. The host does not wait for the device's other work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..device_copies import on_device
from .documents import Document, Plan

FIELDS = 11
"""Number of integers per stretch in the table.

They are: the first token, the document's end, steps, first slot, number of slots, the index of the chunk that
reads the first slot, the index of the first factor, the sum that the stretch starts from, the sum that it
leaves (both numbered as in `Launch`), the row of its base, and 1 if its sum counts for W0's gradient, else 0.
"""


@dataclass(frozen=True)
class Line:
    """The work of one pass on a document: `slots` slots to fill and `steps` steps in all.

    Attributes:
        document: The document.
        number: Index of its first write in the call.
        slots: Slots to fill.
        leads: True if the first slot is filled before any step. Every other slot needs one step.
        steps: Steps in all.
        keeps: True if the caller needs the sum after the last step.
    """

    document: Document
    number: int
    slots: int
    leads: bool
    steps: int
    keeps: bool


@dataclass(frozen=True)
class Stretch:
    """The part of a line in one group: slots first : first + count of the line.

    In the group these slots begin at `slot`. The stretch makes `steps` steps, after the `done` steps of
    earlier groups.
    """

    line: Line
    first: int
    count: int
    slot: int
    done: int
    steps: int
    is_last: bool

    @property
    def leads(self) -> bool:
        return self.line.leads and self.first == 0 and self.count > 0


@dataclass(frozen=True)
class Run:
    """`count` chunks of equal length, tokens start:stop, which use the slots from `slot` on."""

    start: int
    stop: int
    slot: int
    count: int


@dataclass(frozen=True)
class Launch:
    """The launch that fills one group.

    The sums that a stretch starts from and leaves are numbered. A number below `batch` is that row's own
    state, and a larger number is one of the `carries`.

    Attributes:
        table: [stretches, FIELDS] int32 on the device.
        bounds: [splits + 1] int32 on the device; split i walks stretches bounds[i] : bounds[i + 1].
        leads: [n, 5] int32 on the device, or None: the slots that are filled before any step.
        steps: Steps of all stretches.
        moves: True if a stretch starts from a sum or leaves one.
        has_tail: True if a stretch's first step may be an incomplete chunk.
    """

    table: Tensor
    bounds: Tensor
    leads: Tensor | None
    runs: tuple[Run, ...]
    batch: int
    splits: int
    steps: int
    slots: int
    carries: int
    moves: bool
    has_tail: bool
    backward: bool
    is_first: bool


def _reading(plan: Plan, hands_on: bool) -> Iterator[Line]:
    """Yields the lines of the matrices that chunks read.

    hands_on: True also yields the lines of the states after the last writes.
    """
    for document, number in zip(plan.documents, plan.written, strict=False):
        reads = document.chunks - document.read_from
        if hands_on and document.ends:
            yield Line(document, number, reads, document.begins and reads > 0, document.writes, True)
        elif reads:
            yield Line(
                document, number, reads, document.begins, min(document.writes, document.chunks - 1), False
            )


def _writing(plan: Plan, needs_weight: bool) -> Iterator[Line]:
    """Yields the lines of the gradients that reach the writes, from a document's last chunk to its first.

    W0's gradient also needs the tokens outside the walked documents.
    """
    for document, number in zip(plan.documents, plan.written, strict=False):
        # if W0's gradient is not needed, a first chunk that read W0 alone is left out of the sum
        steps = document.chunks - (0 if needs_weight or document.begins else min(1, document.chunks))
        if steps or document.writes or document.begins:
            yield Line(
                document,
                number,
                document.writes,
                0 < document.writes == document.chunks,
                steps,
                document.begins,
            )
    if needs_weight:
        for start, stop in plan.outside:
            document = Document(0, start, stop, plan.chunk, False, False)
            yield Line(document, 0, 0, False, document.chunks, False)


def groups(lines: Iterable[Line], room: int) -> Iterator[list[Stretch]]:
    """Divides the lines, in order, into groups of at most `room` slots."""
    group: list[Stretch] = []
    used = 0
    for line in lines:
        first = done = 0
        while True:
            if used == room and line.slots:
                yield group
                group, used = [], 0
            count = min(room - used, line.slots - first)
            is_last = first + count == line.slots
            stretch = Stretch(line, first, count, used, done, 0, is_last)
            steps = line.steps - done if is_last else count - stretch.leads
            group.append(Stretch(line, first, count, used, done, steps, is_last))
            first, done, used = first + count, done + steps, used + count
            if is_last:
                break
    if group:
        yield group


@lru_cache(maxsize=128)
def reads(plan: Plan, hands_on: bool, room: int, splits: int, device: torch.device) -> tuple[Launch, ...]:
    """Returns the launches that compute the matrices that chunks read.

    Each fills at most `room` slots and has at most `splits` parts.
    """
    return _launches(_reading(plan, hands_on), False, plan.batch, room, splits, device)


@lru_cache(maxsize=128)
def writes(
    plan: Plan, needs_weight: bool, room: int, splits: int, device: torch.device
) -> tuple[Launch, ...]:
    """Returns the launches that compute the gradients of the writes. The limits are those of `reads`."""
    return _launches(_writing(plan, needs_weight), True, plan.batch, room, splits, device)


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copies numbers to the device as int32, once per plan.

    Raises RuntimeError while a CUDA graph is captured, because the copy cannot be part of it.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, but the kernels have not yet run on these documents; run them "
            "once before the capture."
        )
    return on_device(torch.tensor(numbers, dtype=torch.int32), device)


def _launches(
    lines: Iterator[Line], backward: bool, batch: int, room: int, splits: int, device: torch.device
) -> tuple[Launch, ...]:
    found = [_Group(group, number == 0, splits) for number, group in enumerate(groups(lines, room))]
    carried, carries = -1, 0
    for one in found:
        carried = one.number_sums(batch, carried, backward)
        carries = max(carries, carried + 1)
    numbers = [one.numbers() for one in found]
    flat = to_device(list(itertools.chain(*itertools.chain(*numbers))), device)
    launches, done = [], 0
    for one, parts in zip(found, numbers, strict=True):
        table, bounds, leads = flat[done : done + sum(map(len, parts))].split([len(part) for part in parts])
        done += len(table) + len(bounds) + len(leads)
        stretches = one.stretches
        launches.append(
            Launch(
                table.view(-1, FIELDS), bounds, leads.view(-1, 5) if len(leads) else None,
                tuple(one.runs(backward)), batch, len(bounds) - 1,
                sum(stretch.steps for stretch in stretches),
                sum(stretch.count for stretch in stretches), carries,
                any(row[7] >= 0 or row[8] >= 0 for row in one.rows),
                backward and any(map(_is_cut, stretches)), backward, one.is_first,
            )
        )  # fmt: skip
    return tuple(launches)


def _is_cut(stretch: Stretch) -> bool:
    document = stretch.line.document
    return stretch.done == 0 and stretch.steps > 0 and (document.stop - document.start) % document.chunk != 0


class _Group:
    """The stretches of one launch, while their table is built."""

    def __init__(self, stretches: list[Stretch], is_first: bool, splits: int) -> None:
        self.stretches, self.is_first = stretches, is_first
        self.bounds = list(_bounds([stretch.steps for stretch in stretches], splits))
        self.rows: list[list[int]] = []
        self.leads: list[int] = []

    def number_sums(self, batch: int, carried: int, backward: bool) -> int:
        """Builds the rows of the table.

        carried is the index of the carry that the previous group left, or -1. The method returns the index of
        this group's carry. Stretches of one launch run concurrently. So a stretch never writes a carry that
        another stretch of the launch starts from.
        """
        left = -1
        for stretch in self.stretches:
            document, leads = stretch.line.document, stretch.leads
            source = document.row if document.begins and not backward else -1
            if stretch.first > 0 or stretch.done > 0:
                source = batch + carried
            if stretch.is_last:
                target = document.row if stretch.line.keeps else -1
            else:
                left = carried if source >= batch else 1 - carried if carried >= 0 else 0
                target = batch + left
            base = 0 if not backward else document.row if document.ends else -1
            if backward:
                first = document.start + (document.chunks - 1 - stretch.done) * document.chunk
                slot, factor = (
                    stretch.slot + stretch.count - 1,
                    stretch.line.number + document.writes - 1 - stretch.first,
                )
                lead = [slot, -1, base, 0, factor]
                slot, factor = slot - leads, factor - leads
            else:
                first, factor = (
                    document.start + stretch.done * document.chunk,
                    stretch.line.number + stretch.done,
                )
                lead = [stretch.slot, source, 0, 0, 0]
                slot = stretch.slot + leads
            if leads:
                self.leads += lead
            fills = stretch.count - leads
            self.rows.append(
                [
                    first,
                    document.stop,
                    stretch.steps,
                    slot,
                    fills,
                    stretch.done + 1,
                    factor,
                    source,
                    target,
                    base,
                    int(stretch.is_last),
                ]
            )
        return left

    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        return list(itertools.chain(*self.rows)), self.bounds, self.leads

    def runs(self, backward: bool) -> Iterator[Run]:
        for stretch in self.stretches:
            document = stretch.line.document
            first = (
                document.writes - stretch.first - stretch.count
                if backward
                else document.read_from + stretch.first
            )
            last = first + stretch.count
            complete = min(last, (document.stop - document.start) // document.chunk)
            if first < complete:
                yield Run(*document.span(first, complete), stretch.slot, complete - first)
            if max(first, complete) < last:
                yield Run(*document.span(complete, last), stretch.slot + complete - first, 1)


def _bounds(steps: Sequence[int], splits: int) -> Iterator[int]:
    """Yields the bounds of at most `splits` parts of a list of stretches, with about equal steps."""
    yield 0
    total, done, part = max(sum(steps), 1), 0.0, 0
    for number, here in enumerate(steps):
        belongs = min(int((done + here / 2) * splits / total), splits - 1)
        if belongs > part and number:
            yield number
        part = max(part, belongs)
        done += here
    yield len(steps)

"""Faults of documents, their grid of chunks, and padding, in calls without a cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from inplace_ttt.layer.forward_context import ForwardContext
from inplace_ttt.layout import ChunkLayout, Span

from . import conditions as only
from .conditions import When
from .fault import Kind, owned
from .planting import with_documents
from .under_way import Patch, now

Documents = Callable[[tuple[Span, ...], int, int], tuple[Span, ...]]


def shifted_grid(by: float) -> Documents:
    """The first chunk of each document is shorter by some tokens, as if they had come before: it is another
    document of its own."""

    def change(row: tuple[Span, ...], length: int, chunk: int) -> tuple[Span, ...]:
        cut = [(start, min(start + int(by), stop), stop) for start, stop in row]
        return tuple(
            span
            for start, middle, stop in cut
            for span in ((start, middle), (middle, stop))
            if span[0] < span[1]
        )

    return change


def merged(share: float) -> Documents:
    """Documents after the first so many are one."""

    def change(row: tuple[Span, ...], length: int, chunk: int) -> tuple[Span, ...]:
        kept, rest = row[: int(share)], row[int(share) :]
        joined = [(rest[0][0], rest[0][1])] if rest else []
        for start, stop in rest[1:]:
            joined[-1] = (joined[-1][0], stop) if joined[-1][1] == start else joined[-1]
        return (*kept, *joined)

    return change


def moved_border(by: float) -> Documents:
    """A document's first tokens belong to the one before it, or with a number below 0 its last ones to the
    next."""

    def change(row: tuple[Span, ...], length: int, chunk: int) -> tuple[Span, ...]:
        borders = [
            row[0][0],
            *(
                min(max(stop + int(by), start + 1), later - 1)
                for (start, stop), (_, later) in itertools.pairwise(row)
            ),
        ]
        return tuple(zip(borders, [*borders[1:], row[-1][1]], strict=True)) if row else row

    return change


def padding_read_as_text(tokens: float) -> Documents:
    """So many tokens of the padding before a row's text belong to its document."""
    return lambda row, length, chunk: ((max(0, row[0][0] - int(tokens)), row[0][1]), *row[1:]) if row else row


def other_chunk(by: float, when: When) -> Callable[[Patch], None]:
    """Chunks of so many tokens more."""

    def plant(patch: Patch) -> None:
        def layout(self: Any, chunk_size: int) -> ChunkLayout:
            right, call = real(self, chunk_size), now()
            if call is None or not torch.any(when.tokens_of(call)):
                return right
            return ChunkLayout(right.documents, right.length, max(chunk_size + int(by), 1))

        real = ForwardContext.layout
        patch.setattr(ForwardContext, "layout", layout)

    return plant


GRID = (
    only.IN_TRAINING, only.IN_A_BATCH, only.LATER_ROWS, only.UNEVEN, only.PADDED_LEFT, only.LATER_LAYER, only.LAST_LAYER,
    only.AFTER_LOADING, only.PACKED_IN_A_BATCH,
)  # fmt: skip
PACKED = (only.ALWAYS, only.PACKED_IN_A_BATCH, only.LATE_DOCUMENTS, only.LATER_LAYER, only.LATER_ROWS)
KINDS: tuple[Kind, ...] = (
    Kind("the grid starts late", "layout", owned("chunk-size document-grid open-chunk"), with_documents(shifted_grid), (3, 1), GRID, 4),
    Kind("chunks are of another length", "layout", owned("chunk-size"), other_chunk, (1, -1, 7), GRID, 4),
    Kind(
        "documents are not kept apart", "layout", owned("document-reset document-grid"), with_documents(merged), (0, 1, 2, 3), PACKED, 4,
        ("packed",),
    ),
    Kind(
        "a border between documents has moved", "layout", owned("document-reset document-grid"), with_documents(moved_border), (1, -1, 3),
        PACKED, 4, ("packed",),
    ),
    Kind(
        "padding at the left is text", "layout", owned("padding in-batches"), with_documents(lambda _: padding_read_as_text(99)),
        whens=(only.UNEVEN, only.LATER_ROWS, only.LATER_LAYER, only.IN_TRAINING), count=3, scenes=("batch", "training batch"),
    ),
    Kind(
        "some padding at the left is text", "layout", owned("padding in-batches"), with_documents(padding_read_as_text), (1, 2, 5),
        (only.ALWAYS, only.IN_A_BATCH, only.LATER_LAYER), 3, ("batch",),
    ),
)  # fmt: skip

"""The documents of a batch's rows, as spans of token positions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import InPlaceTTTError

Spans = tuple[tuple[int, int], ...]
"""The documents of a row: start and stop of each, in order."""


def document_starts(position_ids: Tensor) -> Tensor:
    """Returns the starts of documents in packed rows.

    A document starts wherever a position is not the previous position plus 1.

    Args:
        position_ids: position ids [B, T].

    Returns:
        A mask [B, T], bool: True at each document's first token.
    """
    return torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)


def spans_of_lengths(lengths: Sequence[Sequence[int]]) -> tuple[Spans, ...]:
    """Returns the documents of rows of adjacent documents.

    Args:
        lengths: for each row, the tokens of its documents, in order.
    """
    rows = []
    for row in lengths:
        ends = [0]
        for n in row:
            ends.append(ends[-1] + n)
        rows.append(tuple(itertools.pairwise(ends)))
    return tuple(rows)


def spans_of_position_ids(position_ids: Tensor) -> tuple[Spans, ...]:
    """Returns the documents of packed rows, which `document_starts` finds.

    Args:
        position_ids: position ids [B, T], integers.
    """
    length = position_ids.shape[1]
    rows = []
    for row in document_starts(position_ids).tolist():
        first = [t for t, is_start in enumerate(row) if is_start]
        rows.append(tuple(zip(first, [*first[1:], length], strict=True)))
    return tuple(rows)


def spans_of_attention_mask(mask: Tensor) -> tuple[Spans, ...]:
    """Returns the documents of rows with at most one document each.

    Args:
        mask: a mask [B, T] that is 0 for padding, at the left or the right.

    Raises:
        InPlaceTTTError: if a row has padding inside its document.
    """
    rows = []
    real, length = mask != 0, mask.shape[1]
    first = real.int().argmax(dim=1).tolist()
    count = real.sum(dim=1).tolist()
    last = (length - real.flip(1).int().argmax(dim=1)).tolist()
    for row, (start, n, stop) in enumerate(zip(first, count, last, strict=True)):
        if n and stop - start != n:
            raise InPlaceTTTError(
                f"row {row} has padding between tokens {start} and {stop}; pad at the left or the right only."
            )
        rows.append(((start, stop),) if n else ())
    return tuple(rows)


def spans_of_cu_seqlens(cu_seqlens: Tensor) -> Spans:
    """Returns the documents of one packed row.

    Args:
        cu_seqlens: cumulative lengths of the documents, from 0, integers [documents + 1].

    Raises:
        InPlaceTTTError: if the lengths do not start at 0, or decrease.
    """
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in itertools.pairwise(ends)):
        raise InPlaceTTTError(
            f"cu_seqlens must start at 0, never decrease, and have at least two numbers, got {ends[:8]}."
        )
    return tuple((a, b) for a, b in itertools.pairwise(ends) if b > a)

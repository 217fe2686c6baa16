"""The first rows of a run against what its documents say: laid out token by token, by nothing that packing uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from ...audit.outcome import Outcome, judged
from .. import batches
from ..data import TrainingData
from ..packing import IGNORED
from ..recipe import Recipe

_ROWS, _TOKENS = 32, 1 << 17
"""How many rows are read: so many, or fewer where they are long, but two at least."""

_OTHER = "other tokens than the documents'"
_POSITIONS = "positions that do not begin with each document"
_MISSING = "tokens of a document that nothing is to predict"
_FOREIGN = "labels that are not the document's next token"


class Place(NamedTuple):
    """What stands at one place of a row. token: None in padding. label: as rows have it, not shifted."""

    token: int | None
    position: int
    label: int


def laid_out(documents: Iterable[Sequence[int]], length: int, align: int) -> Iterator[list[Place]]:
    """Rows of documents one after another, each from a multiple of `align` on; a document starts anew in each row that it reaches."""
    row: list[Place] = []
    for tokens in documents:
        row += [_padding(i) for i in range(-len(row) % align)]
        start = len(row)
        for token in tokens:
            if len(row) == length:
                yield row
                row, start = [], 0
            position = len(row) - start
            row.append(Place(token, position, token if position else IGNORED))
    if row:
        yield row + [_padding(i) for i in range(length - len(row))]


def _padding(position: int) -> Place:
    return Place(None, position, IGNORED)


def read_rows(recipe: Recipe, data: TrainingData) -> Outcome:
    """Tokens, positions and labels of the first rows, by themselves and as a batch."""
    length = recipe.data.sequence_length
    count = max(2, min(_ROWS, _TOKENS // length))
    rows = list(islice(iter(data.train), count))
    off = _off(rows, list(islice(laid_out(data.documents(), length, data.align), count)))
    if recipe.data.recall is not None:  # the task asks for some of its tokens only
        del off[_MISSING]
    unlike = _unlike(rows[:2]) or _unlike(rows[-3:])
    numbers = {"rows": len(rows), "share of places with": off, "not its rows' in a batch": unlike}
    if unlike:
        return judged(False, f"a batch of two rows has not their {' and '.join(unlike)}", numbers, 0)
    worst = max(off, key=lambda what: off[what])
    if off[worst]:
        return judged(False, f"{worst}, in {off[worst]:.1%} of the places of the first {len(rows)} rows", numbers, 0)
    return judged(True, f"the first {len(rows)} rows say what their documents do, and a batch what its rows do", numbers, 0)


def _unlike(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What of the rows their batch has not."""
    batch = batches.collate(rows)
    right = {name: torch.stack([torch.as_tensor(row[name], dtype=torch.int64) for row in rows]) for name in rows[0]}
    return [name for name, tensor in right.items() if name not in batch or not torch.equal(batch[name], tensor)]


def _off(rows: Sequence[dict[str, Any]], wanted: Sequence[list[Place]]) -> dict[str, float]:
    """By what is wrong, the share of places at which it is."""
    wrong = dict.fromkeys((_OTHER, _POSITIONS, _MISSING, _FOREIGN), 0)
    places = 0
    for row, expected in zip(rows, wanted, strict=False):
        for token, position, label, place in zip(row["input_ids"], row["position_ids"], row["labels"], expected, strict=True):
            places += 1
            wrong[_OTHER] += place.token is not None and token != place.token
            wrong[_POSITIONS] += place.token is not None and position != place.position
            wrong[_MISSING] += label == IGNORED and place.label != IGNORED
            wrong[_FOREIGN] += label != IGNORED and (place.label == IGNORED or label != token)
    return {what: number / places for what, number in wrong.items()}

"""The first rows of a run against what its documents say: laid out token by token, by nothing that packing
uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from ...audit.outcome import Outcome, judged
from ...tasks import IGNORED
from ..data.data import TrainingData
from ..data.row_order import rows_to_come
from ..data.streams import RowStream
from ..loop import batches
from ..recipe.recipe import Recipe

_ROWS, _TOKENS = 32, 1 << 17
"""How many rows are read: so many, or fewer where they are long, but two at least."""

_FEW = 512
"""Rows at most, of which the order is looked at."""
_OTHER = "other tokens than the documents'"
_POSITIONS = "positions that do not begin with each document"
_MISSING = "tokens of a document that nothing is to predict"
_FOREIGN = "labels that are not the document's next token"


class Place(NamedTuple):
    """What stands at one place of a row. token: None in padding. label: as rows have it, not shifted."""

    token: int | None
    position: int
    label: int


def laid_out(
    documents: Iterable[Sequence[int]], length: int, align: int, begins: Sequence[int] = ()
) -> Iterator[list[Place]]:
    """Rows of documents one after another, each from a multiple of `align` on; a document starts anew in each
    row that it reaches, one that begins with the special tokens that begin a text with them too."""
    row: list[Place] = []
    for tokens in documents:
        row += [_padding(i) for i in range(-len(row) % align)]
        start = len(row)
        again = begins if [*tokens[: len(begins)]] == [*begins] else ()
        for token in tokens:
            if len(row) == length:
                yield row
                row, start = [_place(first, i) for i, first in enumerate(again if start < length else ())], 0
            row.append(_place(token, len(row) - start))
    if row:
        yield row + [_padding(i) for i in range(length - len(row))]


def _place(token: int, position: int) -> Place:
    return Place(token, position, token if position else IGNORED)


def _padding(position: int) -> Place:
    return Place(None, position, IGNORED)


def read_rows(recipe: Recipe, data: TrainingData) -> Outcome:
    """Tokens, positions and labels of the first rows, by themselves, as a batch, in the order of the run, and
    held out."""
    length = recipe.data.sequence_length
    count = max(2, min(_ROWS, _TOKENS // length))
    rows = list(islice(iter(data.train), count))
    off = _off(rows, list(islice(laid_out(data.documents(), length, data.align, data.begins), count)))
    if recipe.data.recall is not None:  # the task asks for some of its tokens only
        del off[_MISSING]
    unlike = _unlike(rows[:2]) or _unlike(rows[-3:])
    numbers: dict[str, Any] = {
        "rows": len(rows),
        "share of places with": off,
        "not its rows' in a batch": unlike,
    }
    if unlike:
        return judged(False, f"a batch of two rows has not their {' and '.join(unlike)}", numbers, 0)
    if strange := _in_another_order(recipe, data) or _held_out_otherwise(recipe, data):
        return judged(False, strange, numbers, 0)
    worst = max(off, key=lambda what: off[what])
    if off[worst]:
        return judged(
            False, f"{worst}, in {off[worst]:.1%} of the places of the first {len(rows)} rows", numbers, 0
        )
    return judged(
        True,
        f"the first {len(rows)} rows say what their documents do, and a batch what its rows do",
        numbers,
        0,
    )


def _in_another_order(recipe: Recipe, data: TrainingData) -> str:
    """What of the rows that the first steps read is not one of the run's rows each time another; empty where
    all is."""
    if isinstance(data.train, RowStream) or not len(data.train) or len(data.train) > _FEW:
        return ""
    known = Counter(map(_key, data.train))
    met = Counter(map(_key, islice(iter(rows_to_come(data.train, recipe)), len(data.train))))
    if not met.keys() <= known.keys():
        return "a step reads a row that is none of the run's"
    epochs = -(-met.total() // len(data.train))
    return (
        ""
        if all(met[key] <= epochs * known[key] for key in met)
        else "the first epoch reads a row again before it has read the others"
    )


def _held_out_otherwise(recipe: Recipe, data: TrainingData) -> str:
    """What of the first held-out batch is not its rows', each token's label the next one; empty where all
    is."""
    if data.validation is None or not len(data.validation) or recipe.parallel.sequence_parallel_size > 1:
        return ""
    batch = next(batches.held_out_batches(data.validation, recipe, 0))
    for number in range(min(len(data.validation), len(batch["input_ids"]))):
        row = data.validation[number]
        wanted = {
            "input_ids": row["input_ids"],
            "position_ids": row["position_ids"],
            "shift_labels": [*row["labels"][1:], IGNORED],
        }
        for name, values in wanted.items():
            if batch[name][number].tolist() != list(values):
                return f"a held-out batch has not its rows' {name}"
    return ""


def _key(row: dict[str, Any]) -> tuple[int, ...]:
    return (*row["input_ids"], *row["position_ids"], *row["labels"])


def _unlike(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What of the rows their batch has not."""
    batch = batches.collate(rows)
    right = {
        name: torch.stack([torch.as_tensor(row[name], dtype=torch.int64) for row in rows]) for name in rows[0]
    }
    return [
        name for name, tensor in right.items() if name not in batch or not torch.equal(batch[name], tensor)
    ]


def _off(rows: Sequence[dict[str, Any]], wanted: Sequence[list[Place]]) -> dict[str, float]:
    """By what is wrong, the share of places at which it is."""
    wrong = dict.fromkeys((_OTHER, _POSITIONS, _MISSING, _FOREIGN), 0)
    places = 0
    for row, expected in zip(rows, wanted, strict=False):
        for token, position, label, place in zip(
            row["input_ids"], row["position_ids"], row["labels"], expected, strict=True
        ):
            places += 1
            wrong[_OTHER] += place.token is not None and token != place.token
            wrong[_POSITIONS] += place.token is not None and position != place.position
            wrong[_MISSING] += label == IGNORED and place.label != IGNORED
            wrong[_FOREIGN] += label != IGNORED and (place.label == IGNORED or label != token)
    return {what: number / places for what, number in wrong.items()}

"""Compares the first rows of a run with their documents.

The expected rows are made here token by token, without the code that packing uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from ...audit.outcome import Outcome, judged
from ...tasks import IGNORED
from ..data.building import TrainingData
from ..data.row_order import rows_to_come
from ..data.streams import RowStream
from ..loop import batches
from ..recipe.recipe import Recipe

_ROWS, _TOKENS = 32, 1 << 17
"""Upper bounds on the rows and tokens that are read. At least two rows are read."""

_FEW = 512
"""The order of rows is checked only for data of at most this many rows."""
_OTHER = "tokens that differ from the documents"
_POSITIONS = "positions that do not start at 0 with each document"
_MISSING = "tokens of a document without a label"
_FOREIGN = "labels that differ from the document's next token"


class Place(NamedTuple):
    """The expected content of one position in a row.

    Attributes:
        token: token id, None in padding.
        position: position in the document.
        label: the target as rows store it, not shifted.
    """

    token: int | None
    position: int
    label: int


def laid_out(
    documents: Iterable[Sequence[int]], length: int, align: int, begins: Sequence[int] = ()
) -> Iterator[list[Place]]:
    """Yields the rows that packing should make, with documents one after another.

    A document that does not fit goes on in the next row, with positions from 0. If it starts with `begins`,
    the next row's part starts with them too.

    Args:
        documents: token ids of each document.
        length: tokens per row.
        align: every document starts at a multiple of this many tokens in its row.
        begins: special tokens that begin every text.
    """
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
    """Compares tokens, positions and labels of the first rows with the documents.

    The rows are read one by one, as a batch, in the order of the run, and from the held-out data.
    """
    length = recipe.data.sequence_length
    count = max(2, min(_ROWS, _TOKENS // length))
    rows = list(islice(iter(data.train), count))
    off = _off(rows, list(islice(laid_out(data.documents(), length, data.align, data.begins), count)))
    if recipe.data.recall is not None:  # in this task only some tokens are targets
        del off[_MISSING]
    unlike = _unlike(rows[:2]) or _unlike(rows[-3:])
    numbers = {"rows": len(rows), "share of places with": off, "different in a batch": unlike}
    worst = max(off, key=lambda what: off[what])
    strange = f"a batch of two rows differs from its rows in {' and '.join(unlike)}" if unlike else ""
    strange = strange or _in_another_order(recipe, data) or _held_out_otherwise(recipe, data)
    if not strange and off[worst]:
        strange = f"{worst}, in {off[worst]:.1%} of the places of the first {len(rows)} rows"
    found = f"the first {len(rows)} rows match their documents, and a batch matches its rows"
    return judged(not strange, strange or found, numbers, 0)


def _in_another_order(recipe: Recipe, data: TrainingData) -> str:
    """Returns a clause if the first steps read a wrong row or repeat one too early, "" otherwise.

    A stream, and data of more than `_FEW` rows, are not checked.
    """
    if isinstance(data.train, RowStream) or not len(data.train) or len(data.train) > _FEW:
        return ""
    known = Counter(map(_key, data.train))
    met = Counter(map(_key, islice(iter(rows_to_come(data.train, recipe)), len(data.train))))
    if not met.keys() <= known.keys():
        return "a step reads a row that is not in the run's data"
    epochs = -(-met.total() // len(data.train))
    again = any(met[key] > epochs * known[key] for key in met)
    return "the first epoch reads a row again before it has read the others" if again else ""


def _held_out_otherwise(recipe: Recipe, data: TrainingData) -> str:
    """Returns a clause if the first held-out batch differs from its rows, "" otherwise."""
    if data.validation is None or not len(data.validation) or recipe.parallel.sequence_parallel_size > 1:
        return ""
    batch = next(batches.held_out_batches(data.validation, recipe, 0))
    for number in range(min(len(data.validation), len(batch["input_ids"]))):
        row = data.validation[number]
        wanted = {name: row[name] for name in ("input_ids", "position_ids")}
        for name, values in {**wanted, "shift_labels": [*row["labels"][1:], IGNORED]}.items():
            if batch[name][number].tolist() != list(values):
                return f"a held-out batch differs from its rows in {name}"
    return ""


def _key(row: dict[str, Any]) -> tuple[int, ...]:
    return (*row["input_ids"], *row["position_ids"], *row["labels"])


def _unlike(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the names of tensors in which a batch differs from its rows."""
    batch = batches.collate(rows)
    right = {
        name: torch.stack([torch.as_tensor(row[name], dtype=torch.int64) for row in rows]) for name in rows[0]
    }
    return [name for name, t in right.items() if name not in batch or not torch.equal(batch[name], t)]


def _off(rows: Sequence[dict[str, Any]], wanted: Sequence[list[Place]]) -> dict[str, float]:
    """Returns the share of wrong places for each kind of error."""
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

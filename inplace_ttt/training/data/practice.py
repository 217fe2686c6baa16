"""Data augmentation that trains recall beyond the attention window: repeated passages and synthetic facts."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from ...diagnostics.writes import labeled, longest_document
from ...layout import ChunkLayout
from ...tasks.facts import Encode
from ..recipe.data_section import Data
from .packing import lead_of
from .repeated_passages import repeat_passage
from .streams import Row, RowStream
from .told_facts import require_room, tell_facts


def with_practice(rows: Any, data: Data, encode: Encode, begins: Sequence[int] = ()) -> Any:
    """Returns the dataset with its rows augmented as they are read.

    The change of a row depends only on its tokens and the data's seed.

    Args:
        rows: rows to train on, a stored dataset or a `RowStream`.
        data: the recipe's data section.
        encode: returns the token ids of a text inside another.
        begins: special tokens that begin every text. They stay in place.

    Raises:
        InPlaceTTTError: if a row is too short for the facts.
    """
    if data.repeated_passages is None and data.synthetic_facts is None:
        return rows
    if data.synthetic_facts is not None:
        require_room(data.synthetic_facts, data.sequence_length, encode)
    if isinstance(rows, RowStream):
        return dataclasses.replace(
            rows, transform=functools.partial(practiced, data=data, encode=encode, begins=begins)
        )
    return rows.with_transform(
        lambda batch: _transposed([practiced(row, data, encode, begins) for row in _rows(batch)])
    )


def seen_anyway(data: Data, reach: float) -> list[str]:
    """Returns a warning for each augmentation whose later part can still attend to the earlier one.

    Args:
        data: the recipe's data section.
        reach: number of tokens that attention sees back; may be infinite.
    """
    after = {}
    if data.repeated_passages is not None:
        after["repeated_passages"] = data.repeated_passages.length + data.repeated_passages.gap
    if data.synthetic_facts is not None:
        after["synthetic_facts"] = data.synthetic_facts.min_gap
    seen = f"the last {reach:,}" if math.isfinite(reach) else "all tokens"
    return [
        f"data.{name} repeats text after {tokens:,} tokens, but attention sees {seen}: such rows "
        "may train attention instead of fast weights; set model.window to at most that distance"
        for name, tokens in after.items()
        if reach > tokens
    ]


def practiced(row: Row, data: Data, encode: Encode, begins: Sequence[int] = ()) -> Row:
    """Returns the row, or a copy whose longest document has facts or a repeated passage.

    Padding lacks labels, and therefore never counts as a document.

    Args:
        row: `input_ids`, `position_ids` and `labels` as lists of integers.
        data: the recipe's data section.
        encode: returns the token ids of a text inside another.
        begins: special tokens that begin every text. They stay in place.
    """
    generator = random.Random(data.seed ^ crc32(torch.tensor(row["input_ids"]).numpy().tobytes()))
    layout = ChunkLayout.from_position_ids(torch.tensor([row["position_ids"]]), len(row["input_ids"]))
    _, (start, stop) = longest_document(labeled(layout, torch.tensor([row["labels"]])))
    document = slice(start + lead_of(row["input_ids"][start:stop], begins), stop)
    drawn = generator.random()
    if data.synthetic_facts is not None:
        if drawn < data.synthetic_facts.fraction:
            return tell_facts(row, document, data.synthetic_facts, generator, encode)
        drawn -= data.synthetic_facts.fraction
    if data.repeated_passages is not None and drawn < data.repeated_passages.fraction:
        return repeat_passage(row, document, data.repeated_passages, generator)
    return row


def _rows(batch: dict[str, list[Any]]) -> list[Row]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _transposed(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}

"""Training rows in which a passage comes again beyond the attention window, so that the fast weight learns to recall."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any
from zlib import crc32

import torch

from ..diagnostics.writes import longest_document
from ..layout import ChunkLayout
from ..tasks.passages import Passage
from .data_settings import Repeat
from .streams import RowStream


def with_repeated_passages(rows: Any, settings: Repeat | None, seed: int) -> Any:
    """A dataset of rows (stored or streamed), with passages repeated as they are read. Row by row a function of its tokens and the seed."""
    if settings is None:
        return rows
    if isinstance(rows, RowStream):
        return dataclasses.replace(rows, transform=functools.partial(repeat_passage, settings=settings, seed=seed))
    return rows.with_transform(lambda batch: _transposed([repeat_passage(row, settings, seed) for row in _rows(batch)]))


def repeat_passage(row: dict[str, Any], settings: Repeat, seed: int) -> dict[str, Any]:
    """The row itself, or one whose longest document has a passage twice; input_ids, position_ids and labels are lists."""
    passage, ids = Passage(settings.length, settings.gap), torch.tensor(row["input_ids"])
    generator = random.Random(seed ^ crc32(ids.numpy().tobytes()))
    _, (start, stop) = longest_document(ChunkLayout.from_position_ids(torch.tensor([row["position_ids"]]), settings.length))
    if generator.random() >= settings.share or stop - start < passage.tokens:
        return row
    first = start + passage.random_start(stop - start, generator)
    where = passage.second(first)
    labels = torch.tensor(row["labels"])
    ids = passage.repeat(ids, first)
    labels[where] = torch.where(labels[where] >= 0, ids[where], labels[where])
    return {**row, "input_ids": ids.tolist(), "labels": labels.tolist()}


def _rows(batch: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _transposed(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}

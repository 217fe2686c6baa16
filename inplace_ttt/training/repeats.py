"""Training rows in which a passage comes again, beyond what attention sees: what a memory is for."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch

from ..tasks.passages import Passage
from .recipe import Repeat


def with_repeats(rows: Any, settings: Repeat | None, seed: int) -> Any:
    """A dataset of rows (stored or streamed), with passages repeated as they are read. Row by row a function of its tokens and the seed."""
    if settings is None:
        return rows
    if hasattr(rows, "with_transform"):
        return rows.with_transform(lambda batch: _transposed([repeated(row, settings, seed) for row in _rows(batch)]))
    return rows.map(repeated, fn_kwargs={"settings": settings, "seed": seed})


def repeated(row: dict[str, Any], settings: Repeat, seed: int) -> dict[str, Any]:
    """The row itself, or one whose longest document has a passage twice; input_ids, position_ids and labels are lists."""
    passage, ids = Passage(settings.length, settings.gap), torch.tensor(row["input_ids"])
    generator = random.Random(seed ^ crc32(ids.numpy().tobytes()))
    start, stop = _longest_document(row["position_ids"])
    if generator.random() >= settings.share or stop - start < passage.tokens:
        return row
    first = start + passage.random_start(stop - start, generator)
    where = passage.second(first)
    labels = torch.tensor(row["labels"])
    ids = passage.repeat(ids, first)
    labels[where] = torch.where(labels[where] >= 0, ids[where], labels[where])
    return {**row, "input_ids": ids.tolist(), "labels": labels.tolist()}


def _longest_document(positions: list[int]) -> tuple[int, int]:
    starts = [0, *(i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1), len(positions)]
    return max(pairwise(starts), key=lambda span: span[1] - span[0])


def _rows(batch: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _transposed(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}

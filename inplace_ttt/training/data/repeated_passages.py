"""Repeats a passage in a training row, beyond the attention window."""

from __future__ import annotations

import random

import torch

from ...tasks.passages import Passage
from ..recipe.data_section import RepeatedPassages
from .streams import Row


def repeat_passage(row: Row, document: slice, settings: RepeatedPassages, generator: random.Random) -> Row:
    """Returns the row with a passage repeated in one document; the row itself if the document is too short.

    Args:
        row: `input_ids`, `position_ids` and `labels` as lists of integers.
        document: position of the document in the row.
        settings: length of the passage and of the gap, in tokens.
        generator: draws the place of the passage.
    """
    passage, ids, labels = (
        Passage(settings.length, settings.gap),
        torch.tensor(row["input_ids"]),
        torch.tensor(row["labels"]),
    )
    if document.stop - document.start < passage.tokens:
        return row
    first = document.start + passage.random_start(document.stop - document.start, generator)
    where = passage.second(first)
    ids = passage.repeat(ids, first)
    labels[where] = torch.where(labels[where] >= 0, ids[where], labels[where])
    return {**row, "input_ids": ids.tolist(), "labels": labels.tolist()}

"""Training rows in which a passage comes again beyond the attention window."""

from __future__ import annotations

import random

import torch

from ...tasks.passages import Passage
from ..recipe.data_section import RepeatedPassages
from .streams import Row


def repeat_passage(row: Row, document: slice, settings: RepeatedPassages, generator: random.Random) -> Row:
    """The row with a passage twice in its document at that place; the row itself where that is too short."""
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

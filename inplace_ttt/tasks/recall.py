"""The recall task: key-value pairs, then filler, then every key again, to be answered with its value.

The filler is longer than the model's attention window, so that only a fast weight can carry the pairs across
it. A row is one document: `pairs` times (key, value), filler, `pairs` times (key, value) in another order.
Ids below vocabulary/4 are filler, those below vocabulary/2 are keys, and the rest are values. The keys of a
row are different; values may repeat. Labels are -100 except at the values of the second half. They are not
shifted, because transformers shifts them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import InPlaceTTTError
from . import IGNORED

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset


def recall_data(
    rows: int, pairs: int, vocabulary: int, length: int, seed: int, held_out: bool = False
) -> Dataset:
    """Makes rows of the recall task.

    Row i depends only on seed, held_out and i.

    Args:
        rows: number of rows.
        pairs: number of key-value pairs per row.
        vocabulary: number of token ids.
        length: tokens per row.
        seed: seed of the rows.
        held_out: make rows for evaluation, which differ from the training rows.

    Returns:
        A dataset with int32 columns input_ids, position_ids and labels.

    Raises:
        InPlaceTTTError: if the vocabulary has too few keys, or a row is too short.
    """
    import numpy as np
    from datasets import Dataset, Features, List, Value

    keys = vocabulary // 2 - vocabulary // 4
    if not 1 <= pairs <= keys:
        raise InPlaceTTTError(
            f"recall asks for {pairs} pairs, but a vocabulary of {vocabulary} has {keys} keys; lower "
            "data.recall.pairs or raise data.recall.vocabulary."
        )
    if length < 4 * pairs:
        raise InPlaceTTTError(
            f"recall of {pairs} pairs needs at least {4 * pairs} tokens, but sequence_length is {length}; "
            "lower data.recall.pairs or raise data.sequence_length."
        )
    ids = np.empty((rows, length), dtype=np.int32)
    for row in range(rows):
        ids[row] = _row(pairs, vocabulary, length, np.random.default_rng([seed, held_out, row]))
    labels = np.full_like(ids, IGNORED)
    answers = slice(length - 2 * pairs + 1, length, 2)
    labels[:, answers] = ids[:, answers]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    columns = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return Dataset.from_dict(columns, features=Features({name: List(Value("int32")) for name in columns}))


def _row(pairs: int, vocabulary: int, length: int, random: np.random.Generator) -> np.ndarray:
    """Returns the token ids [length] of one row."""
    import numpy as np

    first_key, first_value = vocabulary // 4, vocabulary // 2
    keys = random.permutation(np.arange(first_key, first_value))[:pairs]
    told = np.stack([keys, random.integers(first_value, vocabulary, pairs)], axis=1)
    filler = random.integers(0, max(first_key, 1), length - 4 * pairs)
    return np.concatenate([told.ravel(), filler, random.permutation(told).ravel()])


@torch.no_grad()
def recall_accuracy(model: nn.Module, data: Dataset, batch_size: int = 32) -> float:
    """Returns the share of labels that the model finds most probable.

    Chance is one in vocabulary/2.

    Args:
        model: a causal language model.
        data: rows of `recall_data`.
        batch_size: rows per batch.
    """
    device = next(model.parameters()).device
    right = asked = 0
    for batch in data.with_format("torch").iter(batch_size=batch_size):
        ids, positions, labels = (
            batch[name].to(device).long() for name in ("input_ids", "position_ids", "labels")
        )
        guesses = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].argmax(dim=-1)
        wanted = labels[:, 1:] != IGNORED
        right += int((guesses == labels[:, 1:])[wanted].sum())
        asked += int(wanted.sum())
    return right / asked

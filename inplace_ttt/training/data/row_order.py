"""Fixes the order of a run's rows by its recipe, so that a resumed run continues exactly where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import InPlaceTTTError
from ..recipe.recipe import Recipe
from .streams import Position, RowStream

_POSITION = "rows.json"


def rows_to_come(train: Any, recipe: Recipe, steps_done: int = 0, checkpoint: Path | None = None) -> Any:
    """Returns the rows of the steps after `steps_done`, in order.

    A stored dataset is shuffled anew for each epoch, if the recipe shuffles.

    Args:
        train: the run's rows, a datasets.Dataset or a `RowStream`.
        recipe: the run's recipe.
        steps_done: number of steps that the run has made.
        checkpoint: folder in which `save_position` stored the position in a stream. Without it, the earlier
            rows are made again and dropped.

    Raises:
        InPlaceTTTError: if `train` is empty, or the stored position cannot be read.
    """
    import numpy as np

    steps, read = _rows_read(recipe, recipe.steps), _rows_read(recipe, steps_done)
    if isinstance(train, RowStream):
        o, parallel = recipe.training, recipe.parallel
        ahead = (
            4
            * parallel.world
            * o.batch_size
            * max(o.gradient_accumulation_steps, parallel.sequence_parallel_size)
        )  # upper bound on rows read ahead of the step that is saved
        kept = None if checkpoint is None else checkpoint / _POSITION
        return train.from_row(_position(kept) if kept is not None and kept.exists() else read, ahead)
    if not len(train):
        raise InPlaceTTTError(
            "the data yields no row to train on; give longer documents or a smaller data.sequence_length."
        )
    epochs = range(-(-steps // len(train)))
    if recipe.data.shuffle:
        order = [np.random.default_rng([recipe.data.seed, epoch]).permutation(len(train)) for epoch in epochs]
    else:
        order = [np.arange(len(train)) for _ in epochs]
    # A group of ranks that share rows reads one batch per rank, and trains on these batches one after the
    # other.
    shared, batch = recipe.parallel.sequence_parallel_size, recipe.training.batch_size
    blocks = np.concatenate(order)[read:steps].reshape(-1, shared, recipe.parallel.world // shared, batch)
    return train.select(blocks.swapaxes(1, 2).reshape(-1))


def save_position(rows: Any, recipe: Recipe, steps_done: int, checkpoint: Path) -> None:
    """Stores a stream's position in a checkpoint, so that a resumed run need not make earlier rows again."""
    if isinstance(rows, RowStream):
        position = rows.position(_rows_read(recipe, steps_done))
        (checkpoint / _POSITION).write_text(json.dumps(position.to_dict()))


def _position(file: Path) -> Position:
    try:
        return Position.from_dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InPlaceTTTError(
            f"{file} cannot be read ({error}); remove it, and the run makes the earlier rows again."
        ) from None


def _rows_read(recipe: Recipe, steps: int) -> int:
    """Returns the number of rows read in `steps`. Ranks that share rows read one each, and train on all."""
    shared, micro_steps = (
        recipe.parallel.sequence_parallel_size,
        steps * recipe.training.gradient_accumulation_steps,
    )
    return -(-micro_steps // shared) * recipe.parallel.world * recipe.training.batch_size

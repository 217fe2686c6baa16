"""Loss and accuracy of a run on held-out rows, over all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import Trainer

from ...layer.sequence_parallel import ulysses_group
from ...surgery import share_sequence
from ..recipe.recipe import Recipe
from .batches import held_out_batches, needs_document_lengths, with_document_lengths
from .collectives import summed
from .held_out import held_out_sums


def held_out_metrics(trainer: Trainer, recipe: Recipe, rows: Any, name: str) -> dict[str, float]:
    """Returns loss and accuracy over all ranks.

    Each rank reads rows of its own or, if ranks share rows, its part of them.
    """
    trainer.model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    group = ulysses_group()
    with (
        trainer.compute_loss_context_manager(),
        nullcontext() if group is None else share_sequence(trainer.model, group),
    ):
        for batch in held_out_batches(rows, recipe, trainer.args.process_index):
            batch = trainer._prepare_inputs(batch)
            if needs_document_lengths(recipe):
                batch = with_document_lengths(batch)
            targets = batch.pop("shift_labels")
            sums += held_out_sums(trainer.model, batch, targets).cpu()
    loss, hits, count = summed(sums, trainer.args.device).tolist()
    return (
        {f"{name}_loss": loss / count, f"{name}_accuracy": hits / count}
        if count
        else {f"{name}_loss": float("nan")}
    )

"""The model card of a run's trained checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from ...audit.report import for_card
from ...checkpoint.card import write_card
from ...checkpoint.opened import open_model
from ...surgery import config_of
from ..audit import audited
from ..data.report import DataReport
from ..recipe.recipe import Recipe


def write_run_card(
    folder: Path,
    recipe: Recipe,
    model: PreTrainedModel,
    data: DataReport,
    steps: int,
    evaluation: Mapping[str, float],
) -> None:
    """Writes the model card into a folder of trained weights that is being made.

    Args:
        folder: the folder.
        recipe: the run's recipe.
        model: the trained model.
        data: report on the run's data.
        steps: optimizer steps made.
        evaluation: the figures of the held-out rows, with the Trainer's names; may be empty.
    """
    source = None if recipe.model.path is None else open_model(recipe.model.path)
    base = (source and source.described_base) or {"name_or_path": recipe.model.path}
    held_out = None
    if "eval_off_loss" in evaluation:
        on, off = evaluation["eval_loss"], evaluation["eval_off_loss"]
        rows = min(recipe.monitor.evaluate_rows, (data.validation or {}).get("rows", 0))
        held_out = {"documents": rows, "on": on, "off": off, "difference": {"mean": on - off, "stderr": None}}
    report = audited(recipe.output)
    write_card(
        folder,
        None if source is None else source.folder,
        config_of(model),
        base,
        "lora" if recipe.training.trainable == "lora" else "full",
        training={
            "steps": steps,
            "tokens_a_step": recipe.rows_per_step * recipe.data.sequence_length,
            "trainable": recipe.training.trainable,
            "sources": [Path(found["name"]).name for found in data.sources if found["role"] == "train"],
            "sha256": data.sha256,
        },
        evaluation=held_out,
        audit=None if report is None else for_card(report),
    )

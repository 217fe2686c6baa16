"""Distillation: the model is its own teacher, which attends to the whole row and writes nothing.

The teacher has the student's present weights, so no second model is held. It reads each batch in one more
forward without gradients. Its answers are the soft targets of the tokens that have a label.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from ...attention_window import attention_by
from ...layer.overrides import overriding
from ...ops import state_dtype
from ...surgery import causal_lm, disable_ttt
from ...tasks import IGNORED
from ..recipe.recipe import Recipe


@torch.no_grad()
def teacher_logits(model: nn.Module, batch: dict[str, Any], attention: str) -> Tensor:
    """Returns the logits [B, n, V] of the model with full attention and without writes or dropout.

    Args:
        model: a converted model. Afterwards it is as before.
        batch: arguments of the model, with `logits_to_keep` [n]. Labels are left out.
        attention: name of the implementation that attends to the whole row.
    """
    given = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
    in_training = [module for module in model.modules() if module.training]
    with (
        disable_ttt(model),
        attention_by(causal_lm(model), attention),
        overriding(in_training, training=False),
    ):
        logits: Tensor = model(**given).logits
    return logits


def outputs_and_loss(
    engine: nn.Module, model: nn.Module, batch: dict[str, Any], count: Tensor | None, recipe: Recipe
) -> tuple[Any, Tensor]:
    """Runs a batch, and returns the outputs and the loss of the recipe.

    Without `training.distillation` this is the loss on the labels. With it, for its weight w, it is
    (1 - w) times that loss plus w times KL(teacher ‖ student), a mean over the same targets.

    Args:
        engine: the model as the Trainer calls it.
        model: the model inside.
        batch: arguments of the model, with the targets as `labels` [B, n] and `logits_to_keep` [n].
        count: targets of the optimizer step, over all ranks and micro-steps; None for those of the batch.
        recipe: the run's recipe.
    """
    settings = recipe.training.distillation
    if settings is None:
        outputs = engine(**batch, num_items_in_batch=count)
        return outputs, outputs.loss
    teacher = teacher_logits(model, batch, recipe.model.attn_implementation)
    outputs = engine(**batch, num_items_in_batch=count)
    chosen, dtype = batch["labels"] != IGNORED, state_dtype(teacher.dtype)
    student, wanted = (
        (logits[chosen].to(dtype) / settings.temperature).log_softmax(-1)
        for logits in (outputs.logits, teacher)
    )
    divergence = kl_div(student, wanted, log_target=True, reduction="sum") * settings.temperature**2
    mean = divergence / (chosen.sum() if count is None else count)
    return outputs, (1 - settings.weight) * outputs.loss + settings.weight * mean

"""Checks that a saved checkpoint has every tensor of its model, in full shape."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..errors import InPlaceTTTError
from .names import parameters
from .reading import Checkpoint


def verify_saved(folder: Path, model: PreTrainedModel) -> None:
    """Raises InPlaceTTTError naming the first tensor that is missing or has another shape than the model's.

    ZeRO-3 can save empty tensors.
    """
    if problem := lacking(folder, model):
        raise InPlaceTTTError(
            f"{folder} {problem} after saving; do not use this checkpoint, and check the DeepSpeed settings."
        )


def require_sound(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Checks a checkpoint before another checkpoint is made from it. It reads every tensor.

    Args:
        checkpoint: the checkpoint to check.
        model: the model of its config.json, on any device.

    Raises:
        InPlaceTTTError: if the tensors are not those of `model`, or contain NaN or infinite values.
    """
    if problem := lacking(checkpoint.folder, model):
        raise InPlaceTTTError(
            f"{checkpoint.name} {problem}, so its weights do not match its config.json; copy or convert it "
            "again."
        )
    for name in tqdm(
        sorted(checkpoint.weight_map), desc="checking", unit="tensor", file=sys.stderr, disable=None
    ):
        if not checkpoint.is_finite(name):
            raise InPlaceTTTError(
                f"{checkpoint.name}: {name} holds NaN or infinite numbers; its training run diverged, or the "
                "file is damaged."
            )


def lacking(folder: Path, model: PreTrainedModel) -> str | None:
    """Returns the first difference between a checkpoint's tensors and a model's, or None.

    Args:
        folder: the checkpoint.
        model: the model, on any device.

    Returns:
        The end of a sentence whose subject is the checkpoint, such as "lacks lm_head.weight".
    """
    saved = Checkpoint.open(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    names, wanted = saved.names(model), as_saved(model)
    for name, parameter in parameters(wanted, model).items():
        if parameter not in names:
            if parameter in tied:
                continue
            return f"lacks {name}"
        tensor, (shape, _) = wanted[name], saved.shape_and_dtype(names[parameter])
        if list(shape) != list(tensor.shape):
            return f"holds {name} as {list(shape)} instead of {list(tensor.shape)}"
    return None


def as_saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the tensors that transformers saves for a model, by name, on the meta device.

    They have their full shape, also under ZeRO-3. Some names differ from those of the parameters, and the
    experts are separate tensors.
    """
    whole = {
        name: torch.empty(getattr(p, "ds_shape", p.shape), device="meta")
        for name, p in model.named_parameters()
    }
    written: dict[str, Tensor] = revert_weight_conversion(model, whole)
    return written

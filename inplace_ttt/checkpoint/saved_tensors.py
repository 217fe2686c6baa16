"""A saved checkpoint against the model it was saved from: every tensor there, whole, and of the right
shape."""

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
    """Raises InPlaceTTTError naming the first tensor that is missing or not of the model's shape (ZeRO-3 can
    save empty ones)."""
    if problem := lacking(folder, model):
        raise InPlaceTTTError(
            f"{folder} {problem} after saving; do not use it; check the DeepSpeed settings."
        )


def require_sound(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Refuse a checkpoint that is not `model`, on any device, or holds NaN or infinite numbers, before
    another is made from it.

    Reads every tensor.
    """
    if problem := lacking(checkpoint.folder, model):
        raise InPlaceTTTError(
            f"{checkpoint.name} {problem}, so it is not the model of its config.json; copy or convert it "
            "again."
        )
    for name in tqdm(
        sorted(checkpoint.weight_map), desc="checking", unit="tensor", file=sys.stderr, disable=None
    ):
        if not checkpoint.is_finite(name):
            raise InPlaceTTTError(
                f"{checkpoint.name}: {name} holds NaN or infinite numbers; its run diverged, or it is "
                "damaged."
            )


def lacking(folder: Path, model: PreTrainedModel) -> str | None:
    """What keeps a checkpoint from being `model`, on any device, as the end of a sentence; None where nothing
    does."""
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
    """The parameters on the meta device, whole, as transformers writes them: some under other names, experts
    one by one."""
    whole = {
        name: torch.empty(getattr(p, "ds_shape", p.shape), device="meta")
        for name, p in model.named_parameters()
    }
    written: dict[str, Tensor] = revert_weight_conversion(model, whole)
    return written

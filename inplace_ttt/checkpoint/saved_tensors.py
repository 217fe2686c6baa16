"""A saved checkpoint against the model it was saved from: every tensor there, whole, and of the right shape."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from .reading import Checkpoint


def verify_saved(folder: Path, model: PreTrainedModel) -> None:
    """Raises InPlaceTTTError naming the first tensor that is missing or not of the model's shape (ZeRO-3 can save empty ones)."""
    saved = Checkpoint.open(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for name, parameter in model.named_parameters():
        wanted = list(getattr(parameter, "ds_shape", parameter.shape))
        if name not in saved.weight_map:
            if name in tied:
                continue
            raise InPlaceTTTError(f"{folder} lacks {name} after saving; do not use it; check the DeepSpeed settings.")
        shape, _ = saved.shape_and_dtype(name)
        if list(shape) != wanted:
            raise InPlaceTTTError(f"{name} in {folder} is {list(shape)} instead of {wanted}; do not use it; check the DeepSpeed settings.")

"""Computes fingerprints of the model in a folder without loading it."""

from __future__ import annotations

import os

from ..errors import InPlaceTTTError
from .adapter import is_adapter, located, read_adapter
from .fingerprint import PIECE, fingerprint, looked_at
from .names import parameters
from .reading import Checkpoint
from .saved_tensors import as_saved
from .writing import empty_model


def fingerprint_in(folder: str | os.PathLike[str]) -> str:
    """Returns `fingerprint_of` for the model in a converted folder.

    Raises:
        InPlaceTTTError: if the model is quantized.
    """
    checkpoint = Checkpoint.open(folder)
    if checkpoint.config.get("quantization_config"):
        raise InPlaceTTTError(f"{folder} is quantized, so a session cannot be tied to its weights.")
    _, model = empty_model(checkpoint)
    known = checkpoint.names(model)
    names = ((known[name], most) for name, _, most in looked_at(model))
    return fingerprint(
        checkpoint.tensor(name) if most is None else checkpoint.first(name, most) for name, most in names
    )


def base_fingerprint_in(folder: str | os.PathLike[str]) -> str:
    """Returns the fingerprint of the weights that a LoRA adapter was trained on.

    It covers the first values of every weight outside `ttt`. So a base, its conversion and its adapters have
    the same fingerprint.

    Args:
        folder: base, converted checkpoint or adapter folder.
    """
    checkpoint = Checkpoint.open(
        located(folder, read_adapter(folder)[1]["name_or_path"]) if is_adapter(folder) else folder
    )
    _, model = empty_model(checkpoint)
    known, wanted = checkpoint.names(model), parameters(as_saved(model), model)
    return fingerprint(
        checkpoint.first(known[name], PIECE) for name in wanted.values() if ".ttt." not in name
    )

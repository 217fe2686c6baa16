"""Fingerprints of the model in a folder, without loading it."""

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
    """What `fingerprint_of` gives for the model in a converted folder. Raises InPlaceTTTError for a quantised
    one."""
    checkpoint = Checkpoint.open(folder)
    if checkpoint.config.get("quantization_config"):
        raise InPlaceTTTError(
            f"{folder} is quantised, so that nothing says which weights a session belongs to."
        )
    _, model = empty_model(checkpoint)
    known = checkpoint.names(model)
    names = ((known[name], most) for name, _, most in looked_at(model))
    return fingerprint(
        checkpoint.tensor(name) if most is None else checkpoint.first(name, most) for name, most in names
    )


def base_fingerprint_in(folder: str | os.PathLike[str]) -> str:
    """The fingerprint of what LoRA stands on, the same for a base, its conversion and an adapter: a piece of
    every weight outside `ttt`."""
    checkpoint = Checkpoint.open(
        located(folder, read_adapter(folder)[1]["name_or_path"]) if is_adapter(folder) else folder
    )
    _, model = empty_model(checkpoint)
    known, wanted = checkpoint.names(model), parameters(as_saved(model), model)
    return fingerprint(
        checkpoint.first(known[name], PIECE) for name in wanted.values() if ".ttt." not in name
    )

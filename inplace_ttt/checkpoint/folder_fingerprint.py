"""The fingerprint of the model in a folder, without loading it."""

from __future__ import annotations

import os

from ..errors import InPlaceTTTError
from .fingerprint import fingerprint, looked_at
from .reading import Checkpoint
from .writing import empty_model


def fingerprint_in(folder: str | os.PathLike[str]) -> str:
    """What `fingerprint_of` gives for the model in a converted folder. Raises InPlaceTTTError for a quantised one."""
    checkpoint = Checkpoint.open(folder)
    if checkpoint.config.get("quantization_config"):
        raise InPlaceTTTError(f"{folder} is quantised, so that nothing says which weights a session belongs to.")
    _, model = empty_model(checkpoint)
    names = ((checkpoint.find(name), most) for name, _, most in looked_at(model))
    return fingerprint(checkpoint.tensor(name) if most is None else checkpoint.first(name, most) for name, most in names)

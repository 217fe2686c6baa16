"""The fingerprint of the model in a folder, without loading it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torch import Tensor

from ..errors import InPlaceTTTError
from ..layer.quantised import readable_parameters
from ..surgery import fast_weights
from .fingerprint import PIECE, fingerprint
from .reading import Checkpoint
from .writing import empty_model


def fingerprint_in(folder: str | os.PathLike[str]) -> str:
    """What `fingerprint_of` gives for the model in a converted folder. Raises InPlaceTTTError for a quantised one."""
    checkpoint = Checkpoint.open(folder)
    if checkpoint.config.get("quantization_config"):
        raise InPlaceTTTError(f"{folder} is quantised, so that nothing says which weights a session belongs to.")
    _, model = empty_model(checkpoint)
    layers = {id(module) for module in fast_weights(model).values()}

    def values() -> Iterator[Tensor]:
        for prefix, module in model.named_modules():
            if id(module) in layers:
                yield from (checkpoint.tensor(checkpoint.find(f"{prefix}.{name}")) for name, _ in readable_parameters(module))
        for name, _ in readable_parameters(model):
            yield checkpoint.first(checkpoint.find(name), PIECE)

    return fingerprint(values())

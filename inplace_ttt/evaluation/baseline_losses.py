"""Keeps token losses without writes in a folder, so that models on the same base share them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from .. import __version__
from ..converted_config import of_the_base
from ..errors import InPlaceTTTError
from ..files.folders import require_writable, save_tensors
from ..surgery import disable_ttt, fast_weights
from .token_losses import Progress, token_losses

_REMEDY = "name another folder, or free some space"
_MAY_DIFFER = {"architectures", "transformers_version", "_name_or_path"}
"""Keys of a config in which a base and its conversion may differ."""


class BaselineLosses:
    """Computes token losses with TTT off. With a folder, losses are kept there and read back.

    A file is valid for the same weights (all but conv and P), config, rows, window and attention
    implementation. The kind of device and the versions of torch, transformers and this package must also be
    the same. Runs that train only conv and P share files with each other and with their base. A run that
    trains W0 has its own files.

    The weights of a model are hashed only once. Create a new object after further training.

    Args:
        folder: folder for the losses, or None to keep none.

    Raises:
        InPlaceTTTError: if the folder cannot be written, now or later.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            require_writable(self.folder, _REMEDY)
        self._keys: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()

    def of(self, model: PreTrainedModel, rows: Tensor, *, progress: Progress, **attention: Any) -> Tensor:
        """Returns the token losses of a model with TTT off.

        Args:
            model: a converted model or its base.
            rows: token ids [B, T].
            progress: called with the number of tokens after each piece.
            **attention: `window`, `sinks` and `piece`, as in `token_losses`.

        Returns:
            float32 [B, T - 1] in nats, on the CPU.
        """
        file = (
            None if self.folder is None else self.folder / f"{self._key(model, rows, attention)}.safetensors"
        )
        if file is not None and (found := _held(file, rows)) is not None:
            progress(rows.numel())
            return found
        with disable_ttt(model):
            losses = token_losses(model, rows, progress=progress, **attention)
        if file is not None:
            _keep(losses, file)
        return losses

    def _key(self, model: PreTrainedModel, rows: Tensor, attention: dict[str, Any]) -> str:
        if model not in self._keys:
            by = [
                model.config._attn_implementation,
                model.device.type,
                torch.__version__,
                transformers.__version__,
                __version__,
            ]
            self._keys[model] = f"{digest_without_writes(model)} {by}"
        how = [self._keys[model], list(rows.shape), sorted(attention.items())]
        return hashlib.sha256(
            json.dumps(how).encode() + rows.cpu().contiguous().numpy().tobytes()
        ).hexdigest()[:32]


def digest_without_writes(model: PreTrainedModel) -> str:
    """Returns the SHA-256 of the config and of all weights that a model without writes uses."""
    generators = [layer.ttt for layer in fast_weights(model).values()]
    ttt = {
        id(tensor)
        for generator in generators
        for tensor in chain(generator.parameters(), generator.buffers())
    }
    config = {
        key: value for key, value in of_the_base(model.config.to_dict()).items() if key not in _MAY_DIFFER
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in ttt:
            digest.update(str(tensor.dtype).encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _held(file: Path, rows: Tensor) -> Tensor | None:
    try:
        losses = load_file(file)["losses"]
    except (OSError, SafetensorError, KeyError):
        return None  # absent or incomplete: the losses are computed again
    return losses if losses.shape == (rows.shape[0], rows.shape[1] - 1) else None


def _keep(losses: Tensor, file: Path) -> None:
    partial = file.with_suffix(f".{os.getpid()}")
    with _refusals(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors({"losses": losses}, partial)
        partial.replace(file)


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InPlaceTTTError(f"cannot write {folder}: {reason}; {_REMEDY}.") from None

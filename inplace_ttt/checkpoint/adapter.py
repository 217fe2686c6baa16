"""The adapter form: a conversion's new tensors alone, and which base they belong to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from .. import models
from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..files.folders import new_folder, save_tensors
from ..files.json_files import read_json, write_json
from ..surgery import config_of, fast_weights
from .fingerprint import fingerprint
from .reading import TTT_SHARD, LayerTensors, tensor_names

ADAPTER_CONFIG = "inplace_ttt.json"

_ADAPTER_FORMAT = 1


def write_adapter(folder: Path, config: InPlaceTTTConfig, tensors: LayerTensors, base: Mapping[str, Any]) -> None:
    """The adapter form: the TTT tensors, and which base they belong to (name, revision, fingerprint of W0)."""
    flat = {f"{layer}.{kind}": tensor for layer, pair in tensors.items() for kind, tensor in pair.items()}
    save_tensors(flat, folder / TTT_SHARD)
    write_json(folder / ADAPTER_CONFIG, {"format": _ADAPTER_FORMAT, "config": config.to_dict(), "base": dict(base)})


def save_adapter(model: PreTrainedModel, path: str | os.PathLike[str], *, base: str | None = None, overwrite: bool = False) -> None:
    """Save a converted model's TTT tensors alone, to load onto its base, whose weights must not have been trained.

    base: folder or hub id of the base; where the model was loaded from, without one.
    """
    layers = fast_weights(model)
    if any(module.matrix() is None for module in layers.values()):
        raise InPlaceTTTError(
            "the base is quantised or wrapped, so that the adapter could not be tied to its weights; save the state dict."
        )
    known = getattr(model.config, models.MODEL_TYPE, {}).get("base", {})
    name = base or known.get("name_or_path") or model.config.name_or_path
    if not name:
        raise InPlaceTTTError("the model does not know where its base came from; say it with save_adapter(…, base=…).")
    found = fingerprint(module.weight for module in layers.values())  # type: ignore[misc]
    if known.get("fingerprint") not in (None, found):
        raise InPlaceTTTError("training has changed the down-projections, which an adapter would lose; use save_pretrained.")
    tensors = {index: {kind: tensor.cpu() for kind, tensor in layer.ttt.state_dict().items()} for index, layer in layers.items()}
    with new_folder(path, overwrite=overwrite) as folder:
        write_adapter(folder, config_of(model), tensors, {"name_or_path": name, "revision": known.get("revision"), "fingerprint": found})


def is_adapter(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / ADAPTER_CONFIG).exists()


def read_adapter(path: str | os.PathLike[str]) -> tuple[InPlaceTTTConfig, dict[str, Any], LayerTensors]:
    """Config, base description and tensors of an adapter folder."""
    values = read_json(Path(path) / ADAPTER_CONFIG, f"{path} is not an adapter folder")
    if values.get("format") != _ADAPTER_FORMAT:
        raise InPlaceTTTError(f"{path} has adapter format {values.get('format')!r}, not {_ADAPTER_FORMAT}; upgrade inplace-ttt.")
    shard = Path(path) / TTT_SHARD
    tensors: LayerTensors = {}
    for name in tensor_names(shard):
        layer, _, kind = name.partition(".")
        with safe_open(shard, framework="pt") as file:
            tensors.setdefault(int(layer), {})[kind] = file.get_tensor(name)
    return InPlaceTTTConfig.from_dict(values["config"]), values["base"], tensors

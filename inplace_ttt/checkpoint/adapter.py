"""The adapter format, which consists of a conversion's new tensors and a description of their base."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..config import InPlaceTTTConfig
from ..converted_config import ADAPTER_TYPE, BaseModel, auto_map, write_shim
from ..errors import InPlaceTTTError, reported, shown
from ..files.folders import save_tensors
from ..files.json_files import read_json, write_json
from ..files.paths import name_problem
from ..files.schema import from_values
from .layer_tensors import LayerTensors, check_tensors
from .reading import ADAPTER_CONFIG, CONFIG, TTT_SHARD, tensor_names, ttt_config_in

_ADAPTER_FORMAT = 1
_NAME = re.compile(r"(?P<layer>\d{1,6})\.(?P<kind>[a-z_.]+)")


@dataclass(frozen=True)
class _AdapterBase(BaseModel):
    """The base of an adapter. Its fingerprint is required, since an adapter fits only one base."""

    fingerprint: str = field(kw_only=True)


@dataclass(frozen=True)
class _Adapter:
    """The contents of the adapter file. `InPlaceTTTConfig.from_dict` checks `config`."""

    format: int
    config: dict[str, Any]
    base: _AdapterBase


def write_adapter(
    folder: Path, config: InPlaceTTTConfig, tensors: LayerTensors, base: Mapping[str, Any]
) -> None:
    """Writes an adapter: the TTT tensors, and the base that they belong to.

    Args:
        folder: existing folder to write into.
        config: the TTT config, with the layers as indices.
        tensors: the new tensors of each TTT layer.
        base: name or path, revision, and fingerprint of W0.
    """
    flat = {f"{layer}.{kind}": tensor for layer, pair in tensors.items() for kind, tensor in pair.items()}
    save_tensors(flat, folder / TTT_SHARD)
    write_json(
        folder / ADAPTER_CONFIG, {"format": _ADAPTER_FORMAT, "config": config.to_dict(), "base": dict(base)}
    )
    # by these two files the Auto classes load the folder
    write_json(folder / CONFIG, {"model_type": ADAPTER_TYPE, "auto_map": auto_map("AdapterConfig")})
    write_shim(folder)


def is_adapter(path: str | os.PathLike[str]) -> bool:
    return os.path.lexists(Path(path) / ADAPTER_CONFIG)


def read_adapter(path: str | os.PathLike[str]) -> tuple[InPlaceTTTConfig, dict[str, Any], LayerTensors]:
    """Reads an adapter folder.

    Returns:
        The TTT config, the description of the base, and the new tensors of each layer.

    Raises:
        InPlaceTTTError: if the folder is not an adapter of this version, or its tensors do not fit its
            config.
    """
    file = Path(path) / ADAPTER_CONFIG
    values = read_json(file, f"{path} is not an adapter folder")
    if values.get("format") != _ADAPTER_FORMAT:
        raise InPlaceTTTError(
            f"{path} has adapter format {shown(values.get('format'))}, not {_ADAPTER_FORMAT}; upgrade "
            "inplace-ttt."
        )
    described = from_values(_Adapter, values, str(file))
    config, tensors = ttt_config_in(described.config, file), _read_tensors(Path(path) / TTT_SHARD)
    check_tensors(tensors, config, str(path))
    return config, dataclasses.asdict(described.base), tensors


def located(
    path: str | os.PathLike[str],
    base: str,
    remedy: str = "give its new path with --base, in Python with base=",
) -> str:
    """Returns the base of an adapter, after a check that it exists.

    Args:
        path: the adapter, for the message.
        base: folder or hub id of the base.
        remedy: end of the error message.

    Raises:
        InPlaceTTTError: if the base was a folder and the folder no longer exists.
    """
    if base.startswith((".", "/", "~")) and not os.path.lexists(base) and name_problem(base) is None:
        raise InPlaceTTTError(f"{path} is an adapter of {base}, which does not exist; {remedy}.")
    return base


def _read_tensors(shard: Path) -> LayerTensors:
    tensors: LayerTensors = {}
    for name in tensor_names(shard):
        if (match := _NAME.fullmatch(name)) is None:
            raise InPlaceTTTError(
                f"{shard} has a tensor {shown(name)}, which no adapter has; write the adapter again."
            )
        with reported(f"cannot read {name} in {shard}"), safe_open(shard, framework="pt") as held:
            tensors.setdefault(int(match["layer"]), {})[match["kind"]] = held.get_tensor(name)
    return tensors

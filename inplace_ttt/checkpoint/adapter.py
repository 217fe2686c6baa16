"""The adapter form: a conversion's new tensors alone, and which base they belong to."""

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
from ..errors import InPlaceTTTError, reported, shown
from ..files.folders import save_tensors
from ..files.json_files import read_json, write_json
from ..files.paths import name_problem
from ..files.schema import from_values
from .reading import (
    ADAPTER_CONFIG,
    TTT_SHARD,
    BaseModel,
    LayerTensors,
    check_tensors,
    tensor_names,
    ttt_config_in,
)

_ADAPTER_FORMAT = 1
_NAME = re.compile(r"(?P<layer>\d{1,6})\.(?P<kind>[a-z_.]+)")


@dataclass(frozen=True)
class _AdapterBase(BaseModel):
    """An adapter is of no use without its base's fingerprint."""

    fingerprint: str = field(kw_only=True)


@dataclass(frozen=True)
class _Adapter:
    """The adapter's file; `config` is the TTT config's to check."""

    format: int
    config: dict[str, Any]
    base: _AdapterBase


def write_adapter(
    folder: Path, config: InPlaceTTTConfig, tensors: LayerTensors, base: Mapping[str, Any]
) -> None:
    """The adapter form: the TTT tensors, and which base they belong to (name, revision, fingerprint of
    W0)."""
    flat = {f"{layer}.{kind}": tensor for layer, pair in tensors.items() for kind, tensor in pair.items()}
    save_tensors(flat, folder / TTT_SHARD)
    write_json(
        folder / ADAPTER_CONFIG, {"format": _ADAPTER_FORMAT, "config": config.to_dict(), "base": dict(base)}
    )


def is_adapter(path: str | os.PathLike[str]) -> bool:
    return os.path.lexists(Path(path) / ADAPTER_CONFIG)


def read_adapter(path: str | os.PathLike[str]) -> tuple[InPlaceTTTConfig, dict[str, Any], LayerTensors]:
    """Config, base description and tensors of an adapter folder."""
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
    path: str | os.PathLike[str], base: str, remedy: str = "say where it is now by --base, in Python by base="
) -> str:
    """The base that an adapter names. Raises InPlaceTTTError where that was a folder and nothing is there
    now."""
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

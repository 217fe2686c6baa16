"""A checkpoint folder, read without loading it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import models
from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError, one_line
from ..files.json_files import read_json
from .fingerprint import fingerprint

TTT_SHARD = "inplace_ttt.safetensors"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BLOCK_BYTES = 1 << 24
_TTT_NAME = re.compile(r"\.(?P<layer>\d+)\.\D*\.(?P<ttt>ttt\.(?P<kind>[\w.]+))$")

LayerTensors = dict[int, dict[str, Tensor]]
"""TTT layer -> its new tensors: conv [d, 1, k], proj [d, d], and those of the extensions (`TargetGenerator`)."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: its config.json and which file holds which tensor. Reads headers only."""

    folder: Path
    name: str  # what the user called it: a path or a hub id
    revision: str | None
    config: dict[str, Any]
    weight_map: dict[str, str]

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> Checkpoint:
        """A folder or a hub id. Raises InPlaceTTTError when it is no safetensors checkpoint, or a corrupt one."""
        folder, revision = _resolve(source)
        config = read_json(folder / "config.json", f"{source} is not a model folder")
        if (folder / _SINGLE).exists():
            weight_map = dict.fromkeys(tensor_names(folder / _SINGLE), _SINGLE)
        elif (folder / INDEX).exists():
            weight_map = read_json(folder / INDEX, f"{source} has a broken index")["weight_map"]
            for shard in sorted(set(weight_map.values())):
                present = set(tensor_names(folder / shard))
                if lost := sorted(key for key, file in weight_map.items() if file == shard and key not in present):
                    raise InPlaceTTTError(f"{folder / shard} lacks {lost[0]}, which the index names; download the checkpoint again.")
        else:
            raise InPlaceTTTError(f"{source} has no {_SINGLE} and no {INDEX}; save the model with save_pretrained() first.")
        return cls(folder, str(source), revision, config, weight_map)

    def tensor(self, name: str) -> Tensor:
        with safe_open(self.folder / self.weight_map[name], framework="pt") as file:
            return file.get_tensor(name)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The rows of a matrix, some MiB at a time."""
        with safe_open(self.folder / self.weight_map[name], framework="pt") as file:
            rows = file.get_slice(name)
            count, width = rows.get_shape()
            step = max(1, _BLOCK_BYTES // (4 * width))
            for first in range(0, count, step):
                yield rows[first : first + step]

    def shape_and_dtype(self, name: str) -> tuple[list[int], torch.dtype]:
        with safe_open(self.folder / self.weight_map[name], framework="pt") as file:
            rows = file.get_slice(name)
            return rows.get_shape(), rows[:0].dtype

    def find(self, parameter: str) -> str:
        """The checkpoint's name of a model's parameter: some checkpoints leave the base model's prefix out."""
        for name in (parameter, parameter.partition(".")[2]):
            if name in self.weight_map:
                return name
        raise InPlaceTTTError(f"{self.name} has no tensor {parameter}; its weights are not those of its config.json.")

    @property
    def section(self) -> Mapping[str, Any] | None:
        """The `inplace_ttt` section of config.json, or None for a base model."""
        return self.config.get(models.MODEL_TYPE) if self.config.get("model_type") == models.MODEL_TYPE else None

    @property
    def ttt_config(self) -> InPlaceTTTConfig:
        if self.section is None:
            raise InPlaceTTTError(f"{self.name} is not a converted checkpoint; run `inplace-ttt convert` on it first.")
        return InPlaceTTTConfig.from_dict(self.section["config"])

    def ttt_tensors(self) -> LayerTensors:
        """The TTT tensors of a converted checkpoint, layer by layer."""
        found: LayerTensors = {}
        for name in sorted(self.weight_map):
            if (match := _TTT_NAME.search(name)) is not None:
                found.setdefault(int(match["layer"]), {})[match["kind"]] = self.tensor(name)
        if sorted(found) != list(self.ttt_config.layers) or any(set(pair) != kinds(self.ttt_config) for pair in found.values()):
            raise InPlaceTTTError(
                f"{self.name} has TTT tensors for layers {sorted(found)}, its config names {list(self.ttt_config.layers)}."
            )
        return dict(sorted(found.items()))

    def down_projections(self) -> dict[int, str]:
        """Layer -> name of W0, for the TTT layers of a converted checkpoint."""
        names = {int(m["layer"]): name[: m.start("ttt")] + "weight" for name in self.weight_map if (m := _TTT_NAME.search(name))}
        return dict(sorted(names.items()))

    def fingerprint(self, matrices: Iterable[str]) -> str:
        """fingerprint over matrices of the checkpoint, a few MiB in memory at a time."""
        return fingerprint(block for name in matrices for block in self.blocks(name))


def kinds(config: InPlaceTTTConfig) -> set[str]:
    """Names of the tensors that a TTT layer adds."""
    return (
        {"conv", "proj"}
        | ({"mean", "gain"} if config.standardised else set())
        | ({"keys.basis", "keys.scale"} if config.whitening else set())
    )


def parameters_of(tensors: LayerTensors) -> int:
    """Numbers among a conversion's tensors that are trained; the others were measured."""
    return sum(pair[kind].numel() for pair in tensors.values() for kind in ("conv", "proj"))


def _resolve(source: str | os.PathLike[str]) -> tuple[Path, str | None]:
    folder = Path(source)
    if folder.is_dir():
        return folder, None
    if folder.exists():
        raise InPlaceTTTError(f"{source} is a file; give the model's folder or a hub id.")
    if len(folder.parts) > 2 or str(source).startswith((".", "/", "~")):
        raise InPlaceTTTError(f"{source} does not exist; give a model folder or a hub id.")
    try:
        patterns = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]
        snapshot = Path(snapshot_download(str(source), allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InPlaceTTTError(f"{source} is neither a folder nor a model that can be downloaded: {one_line(error)}") from None
    return snapshot, snapshot.name


def tensor_names(shard: Path) -> list[str]:
    """Names of the tensors in a safetensors file."""
    try:
        with safe_open(shard, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise InPlaceTTTError(f"{shard} is missing or not a safetensors file ({one_line(error)}); download or save it again.") from None

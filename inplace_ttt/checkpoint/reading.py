"""Reads a checkpoint folder without loading the model."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ..config import InPlaceTTTConfig
from ..converted_config import MODEL_TYPE, checked_section
from ..errors import InPlaceTTTError, reported, shown
from ..files.json_files import read_json
from ..files.manifest import recorded, refuse_changed_link
from ..files.paths import name_problem, refuse_pipes_in, require_regular
from ..files.schema import Open, from_values
from .fingerprint import fingerprint
from .layer_tensors import LayerTensors, check_tensors, require_numbers
from .names import TensorNames

TTT_SHARD = "inplace_ttt.safetensors"
ADAPTER_CONFIG = "inplace_ttt.json"
CONFIG = "config.json"
PEFT_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# fmt: off
WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.npz", "*.ot",
      "*.tflite", "*.pb"),
    *("*.onnx", "*.onnx_data", "*.onnx.data", "*.mlmodel", "*.mlpackage/*", "*.distcp", "*.zip", "*.tar",
      "*.gz"),
)
# fmt: on
"""Patterns of files that hold weights or states, in any format."""
_BLOCK_BYTES = 1 << 24
_TTT_NAME = re.compile(r"\.(?P<layer>\d+)\.(?:[^.]+\.)*?(?P<ttt>ttt\.(?P<kind>[\w.]+))$")


@dataclass(frozen=True)
class _Config(Open):
    """The keys of config.json that are checked here. transformers checks the others."""

    architectures: list[str] | None = None


@dataclass(frozen=True)
class _Index(Open):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with its config.json and the file of each tensor. `open` reads headers only."""

    folder: Path
    name: str  # as the user gave it: a path or a hub id
    revision: str | None
    config: dict[str, Any]
    weight_map: dict[str, str]

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> Checkpoint:
        """Opens a folder or a hub id.

        Raises:
            InPlaceTTTError: if it is not a safetensors checkpoint, or is corrupt.
        """
        folder, revision = _resolve(source)
        return cls._in(folder, str(source), revision)

    @classmethod
    def here(cls, source: str, revision: str | None) -> Checkpoint | None:
        """Opens a folder, or a hub id's snapshot in the local cache, without the network.

        Returns None if there is no safetensors checkpoint.
        """
        try:
            folder = (
                source
                if os.path.isdir(source)
                else snapshot_download(source, revision=revision, local_files_only=True)
            )
            return cls._in(Path(folder), source, revision)
        except (InPlaceTTTError, OSError, ValueError):
            # the weights have another format (.bin), or are not in the cache, or the id is invalid
            return None

    @classmethod
    def _in(cls, folder: Path, source: str, revision: str | None) -> Checkpoint:
        config = read_config(folder)
        if (folder / _SINGLE).exists():
            weight_map = dict.fromkeys(tensor_names(folder / _SINGLE), _SINGLE)
        elif (folder / INDEX).exists():
            weight_map = _proved_index(folder)
        else:
            raise InPlaceTTTError(
                f"{source} lacks {_SINGLE} and {INDEX}; save the model with save_pretrained() first."
            )
        _refuse_more_layers_than_tensors(folder, config, len(weight_map))
        return cls(folder, source, revision, config, weight_map)

    @contextmanager
    def _file_of(self, name: str) -> Iterator[Any]:
        """Opens the safetensors file of a tensor. An error of safetensors is raised again as one sentence."""
        shard = self.folder / self.weight_map[name]
        with reported(f"cannot read {name} in {shard}"), safe_open(shard, framework="pt") as file:
            yield file

    def tensor(self, name: str) -> Tensor:
        with self._file_of(name) as file:
            return file.get_tensor(name)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yields the rows of a matrix, some MiB at a time."""
        with self._file_of(name) as file:
            rows = file.get_slice(name)
            count, width = rows.get_shape()
            step = max(1, _BLOCK_BYTES // (4 * width))
            for first in range(0, count, step):
                yield rows[first : first + step]

    def is_finite(self, name: str) -> bool:
        """Returns False if a tensor holds NaN or infinities. A matrix is read some MiB at a time."""
        parts = self.blocks(name) if len(self.shape_and_dtype(name)[0]) == 2 else [self.tensor(name)]
        return all(bool(part.float().isfinite().all()) for part in parts)

    def first(self, name: str, numbers: int) -> Tensor:
        """Returns the first values of a tensor, flattened."""
        with self._file_of(name) as file:
            rows = file.get_slice(name)
            if not rows.get_shape():  # a scalar cannot be sliced
                return file.get_tensor(name).reshape(-1)
            inner = math.prod(rows.get_shape()[1:])
            return rows[: -(-numbers // max(inner, 1))].reshape(-1)[:numbers]

    def shape_and_dtype(self, name: str) -> tuple[list[int], torch.dtype]:
        with self._file_of(name) as file:
            rows = file.get_slice(name)
            return rows.get_shape(), (rows[:0] if rows.get_shape() else file.get_tensor(name)).dtype

    def names(self, model: PreTrainedModel) -> TensorNames:
        """Returns the tensor name of each of a model's parameters."""
        return TensorNames(self.weight_map, model, self.name)

    @property
    def section(self) -> Mapping[str, Any] | None:
        """The `inplace_ttt` section of config.json; None for a base model."""
        if self.config.get("model_type") != MODEL_TYPE:
            return None
        return checked_section(self.config, self.folder / CONFIG)

    @property
    def ttt_config(self) -> InPlaceTTTConfig:
        if self.section is None:
            raise InPlaceTTTError(
                f"{self.name} is not a converted checkpoint; run `inplace-ttt convert` on it first."
            )
        return ttt_config_in(self.section["config"], self.folder / CONFIG)

    def ttt_tensors(self) -> LayerTensors:
        """Returns the TTT tensors of a converted checkpoint, by layer."""
        found: LayerTensors = {}
        for name in sorted(self.weight_map):
            if (match := _TTT_NAME.search(name)) is not None:
                found.setdefault(int(match["layer"]), {})[match["kind"]] = self.tensor(name)
        check_tensors(found, self.ttt_config, self.name)
        return dict(sorted(found.items()))

    def require_ttt_dtypes(self) -> None:
        """Raises InPlaceTTTError for TTT tensors in a storage format; transformers would load zeros."""
        for name in self.weight_map:
            if (match := _TTT_NAME.search(name)) is not None:
                dtype = self.shape_and_dtype(name)[1]
                require_numbers(
                    torch.zeros((), dtype=dtype), f"{self.name}: {match['kind']} of layer {match['layer']}"
                )

    def down_projections(self) -> dict[int, str]:
        """Returns TTT layer -> name of its W0, for a converted checkpoint."""
        names = {
            int(m["layer"]): name[: m.start("ttt")] + "weight"
            for name in self.weight_map
            if (m := _TTT_NAME.search(name))
        }
        return dict(sorted(names.items()))

    def fingerprint(self, matrices: Iterable[str]) -> str:
        """Returns the fingerprint of matrices and their scales. It reads a few MiB at a time."""
        return fingerprint(block for name in matrices for block in self._blocks_with_scales(name))

    def _blocks_with_scales(self, name: str) -> Iterator[Tensor]:
        """Yields a matrix, then its quantizer's tensors `NAME_…`. Together they determine the weight."""
        yield from self.blocks(name)
        for beside in sorted(other for other in self.weight_map if other.startswith(f"{name}_")):
            yield self.tensor(beside).reshape(-1)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns a model folder's config.json.

    Raises:
        InPlaceTTTError: if `folder` is not a model folder, or has a pipe or device that would block a reader.
    """
    if not os.path.isdir(folder):
        raise InPlaceTTTError(f"{folder} is not a model folder.")
    refuse_pipes_in(folder)
    if is_peft_adapter(folder):
        raise InPlaceTTTError(
            f"{folder} is an adapter of PEFT; merge it into its base with `inplace-ttt export {folder} OUT "
            "--format full`, and use the folder OUT."
        )
    values = read_json(folder / CONFIG, f"{folder} is not a model folder")
    known = from_values(_Config, values, str(folder / CONFIG))
    return {**values, **{key: value for key, value in vars(known).items() if key in values}}


def is_peft_adapter(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / PEFT_CONFIG).is_file() and not (Path(path) / CONFIG).exists()


def ttt_config_in(values: Any, file: Path) -> InPlaceTTTConfig:
    """Returns the TTT config in a file.

    Raises:
        InPlaceTTTError: naming `file`, if the config is invalid or does not name its layers by their indices.
    """
    try:
        config = InPlaceTTTConfig.from_dict(values)
    except InPlaceTTTError as error:
        raise InPlaceTTTError(f"{file}: {error}") from None
    if not isinstance(config.layers, tuple):
        raise InPlaceTTTError(f"{file}: layers must be written out here, got {config.layers!r}.")
    return config


def layer_of(name: str) -> int | None:
    """Returns the layer of a TTT tensor, from its name in a checkpoint; None for other tensors."""
    match = _TTT_NAME.search(name)
    return int(match["layer"]) if match else None


def _proved_index(folder: Path) -> dict[str, str]:
    """Returns the index's dict from tensor to shard.

    It checks that the shards have these tensors and are unchanged.
    """
    index = from_values(
        _Index, read_json(folder / INDEX, f"{folder} has a broken index"), str(folder / INDEX)
    )
    known = recorded(folder)
    for shard in sorted(set(index.weight_map.values())):
        if Path(shard).name != shard:
            raise InPlaceTTTError(
                f"{folder / INDEX}: {shown(shard)} is not the name of a file in the folder."
            )
        present = set(tensor_names(folder / shard))
        if lost := sorted(
            key for key, file in index.weight_map.items() if file == shard and key not in present
        ):
            raise InPlaceTTTError(
                f"{folder / shard} lacks {shown(lost[0])}, which the index names; download the checkpoint "
                "again."
            )
        refuse_changed_link(folder / shard, known.get(shard))
    return index.weight_map


def _refuse_more_layers_than_tensors(folder: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raises InPlaceTTTError if config.json has more layers than the weights have tensors.

    It then belongs to another model, and building that model could take very long.
    """
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if isinstance(values.get(name), (int, float)) and values[name] > tensors:
                raise InPlaceTTTError(
                    f"{folder / CONFIG} has {name} {shown(values[name])}, but its weights are only "
                    f"{tensors} tensors."
                )


def is_folder(source: str | os.PathLike[str]) -> bool:
    """Returns True if a model is a local folder, and False if its name can be a hub id.

    Raises:
        InPlaceTTTError: if it can be neither.
    """
    if os.path.isdir(source):
        return True
    if (problem := name_problem(str(source))) is not None:
        raise InPlaceTTTError(f"{shown(str(source))} {problem}; give a model folder or a hub id.")
    if os.path.lexists(source):
        raise InPlaceTTTError(f"{source} is a file; give the model's folder or a hub id.")
    if len(Path(source).parts) > 2 or str(source).startswith((".", "/", "~")):
        raise InPlaceTTTError(f"{source} does not exist; give a model folder or a hub id.")
    return False


def _resolve(source: str | os.PathLike[str]) -> tuple[Path, str | None]:
    if is_folder(source):
        return Path(source), None
    with reported(f"{source} is neither a folder nor a model that can be downloaded"):
        others = [pattern for pattern in WEIGHTS if pattern != "*.safetensors"]
        snapshot = Path(snapshot_download(str(source), ignore_patterns=[*others, "consolidated*", ".*"]))
    return snapshot, snapshot.name


def tensor_names(shard: Path) -> list[str]:
    """Returns the names of the tensors in a safetensors file.

    Raises:
        InPlaceTTTError: if it is missing or not a safetensors file of a model.
    """
    require_regular(shard, "it is not a safetensors file")
    problem = f"{shard} is missing or not a safetensors file"
    with reported(problem, "download or save it again"), safe_open(shard, framework="pt") as file:
        names = list(file.keys())
    for name in names:
        if len(name) > 1000:
            raise InPlaceTTTError(
                f"{shard} is not a safetensors file of a model: it has a tensor named {shown(name)}."
            )
    return names

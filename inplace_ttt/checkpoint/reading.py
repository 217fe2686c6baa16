"""A checkpoint folder, read without loading it."""

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
from ..converted_config import MODEL_TYPE
from ..errors import InPlaceTTTError, reported, shown
from ..files.json_files import read_json
from ..files.manifest import recorded, refuse_changed_link
from ..files.paths import name_problem, refuse_pipes_in, require_regular
from ..files.schema import Open, from_values
from ..layer.quantised import parameter_dtype
from .fingerprint import fingerprint
from .names import TensorNames

TTT_SHARD = "inplace_ttt.safetensors"
ADAPTER_CONFIG = "inplace_ttt.json"
CONFIG = "config.json"
PEFT_CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
WEIGHTS = (
    *(
        "*.safetensors",
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.h5",
        "*.msgpack",
        "*.gguf",
        "*.npz",
        "*.ot",
        "*.tflite",
        "*.pb",
    ),
    *(
        "*.onnx",
        "*.onnx_data",
        "*.onnx.data",
        "*.mlmodel",
        "*.mlpackage/*",
        "*.distcp",
        "*.zip",
        "*.tar",
        "*.gz",
    ),
)
"""Patterns of files that hold weights or states, in whatever format."""
_BLOCK_BYTES = 1 << 24
_TTT_NAME = re.compile(r"\.(?P<layer>\d+)\.(?:[^.]+\.)*?(?P<ttt>ttt\.(?P<kind>[\w.]+))$")

LayerTensors = dict[int, dict[str, Tensor]]
"""TTT layer -> its new tensors: conv [d, 1, k], proj [d, d], and those of the extensions
(`TargetGenerator`)."""


@dataclass(frozen=True)
class BaseModel(Open):
    """Which base a conversion stands on. fingerprint: of its W0, as `fingerprint` gives it; None where
    nothing is known of it."""

    name_or_path: str
    revision: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class _Config(Open):
    """The keys of config.json that we read before transformers does; it checks the others."""

    architectures: list[str] | None = None


@dataclass(frozen=True)
class _Section(Open):
    """The `inplace_ttt` section of config.json; `config` is the TTT config's to check."""

    base_model_type: str
    config: dict[str, Any]
    base: BaseModel | None = None


@dataclass(frozen=True)
class _Index(Open):
    weight_map: dict[str, str]


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
        """A folder or a hub id. Raises InPlaceTTTError when it is no safetensors checkpoint, or a corrupt
        one."""
        folder, revision = _resolve(source)
        return cls._in(folder, str(source), revision)

    @classmethod
    def here(cls, source: str, revision: str | None) -> Checkpoint | None:
        """A folder, or what the hub's cache holds of an id, without the network; None where that is no
        checkpoint of safetensors."""
        try:
            folder = (
                source
                if os.path.isdir(source)
                else snapshot_download(source, revision=revision, local_files_only=True)
            )
            return cls._in(Path(folder), source, revision)
        except (InPlaceTTTError, OSError, ValueError):
            # other weights, as .bin; nothing in the cache; no id at all
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
                f"{source} has no {_SINGLE} and no {INDEX}; save the model with save_pretrained() first."
            )
        _refuse_more_layers_than_tensors(folder, config, len(weight_map))
        return cls(folder, source, revision, config, weight_map)

    @contextmanager
    def _file_of(self, name: str) -> Iterator[Any]:
        """The safetensors file that holds a tensor; what the library or torch has against it becomes one
        sentence."""
        shard = self.folder / self.weight_map[name]
        with reported(f"cannot read {name} in {shard}"), safe_open(shard, framework="pt") as file:
            yield file

    def tensor(self, name: str) -> Tensor:
        with self._file_of(name) as file:
            return file.get_tensor(name)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The rows of a matrix, some MiB at a time."""
        with self._file_of(name) as file:
            rows = file.get_slice(name)
            count, width = rows.get_shape()
            step = max(1, _BLOCK_BYTES // (4 * width))
            for first in range(0, count, step):
                yield rows[first : first + step]

    def is_finite(self, name: str) -> bool:
        """False for a tensor with NaN or infinite numbers; a matrix is read some MiB at a time."""
        parts = self.blocks(name) if len(self.shape_and_dtype(name)[0]) == 2 else [self.tensor(name)]
        return all(bool(part.float().isfinite().all()) for part in parts)

    def first(self, name: str, numbers: int) -> Tensor:
        """The first numbers of a tensor, flattened."""
        with self._file_of(name) as file:
            rows = file.get_slice(name)
            if not rows.get_shape():  # a number by itself has no slices
                return file.get_tensor(name).reshape(-1)
            inner = math.prod(rows.get_shape()[1:])
            return rows[: -(-numbers // max(inner, 1))].reshape(-1)[:numbers]

    def shape_and_dtype(self, name: str) -> tuple[list[int], torch.dtype]:
        with self._file_of(name) as file:
            rows = file.get_slice(name)
            return rows.get_shape(), (rows[:0] if rows.get_shape() else file.get_tensor(name)).dtype

    def names(self, model: PreTrainedModel) -> TensorNames:
        """The tensor of each of a model's parameters."""
        return TensorNames(self.weight_map, model, self.name)

    @property
    def section(self) -> Mapping[str, Any] | None:
        """The `inplace_ttt` section of config.json, or None for a base model."""
        if self.config.get("model_type") != MODEL_TYPE:
            return None
        section = self.config.get(MODEL_TYPE)
        from_values(_Section, section, f"{self.folder / CONFIG}, {MODEL_TYPE}")
        return section

    @property
    def ttt_config(self) -> InPlaceTTTConfig:
        if self.section is None:
            raise InPlaceTTTError(
                f"{self.name} is not a converted checkpoint; run `inplace-ttt convert` on it first."
            )
        return ttt_config_in(self.section["config"], self.folder / CONFIG)

    def ttt_tensors(self) -> LayerTensors:
        """The TTT tensors of a converted checkpoint, layer by layer."""
        found: LayerTensors = {}
        for name in sorted(self.weight_map):
            if (match := _TTT_NAME.search(name)) is not None:
                found.setdefault(int(match["layer"]), {})[match["kind"]] = self.tensor(name)
        check_tensors(found, self.ttt_config, self.name)
        return dict(sorted(found.items()))

    def require_ttt_dtypes(self) -> None:
        """Refuse TTT tensors in a storage format, which transformers would load as zeros. Reads headers
        alone."""
        for name in self.weight_map:
            if (match := _TTT_NAME.search(name)) is not None:
                dtype = self.shape_and_dtype(name)[1]
                require_numbers(
                    torch.zeros((), dtype=dtype), f"{self.name}: {match['kind']} of layer {match['layer']}"
                )

    def down_projections(self) -> dict[int, str]:
        """Layer -> name of W0, for the TTT layers of a converted checkpoint."""
        names = {
            int(m["layer"]): name[: m.start("ttt")] + "weight"
            for name in self.weight_map
            if (m := _TTT_NAME.search(name))
        }
        return dict(sorted(names.items()))

    def fingerprint(self, matrices: Iterable[str]) -> str:
        """fingerprint over matrices of the checkpoint with their scales, a few MiB in memory at a time."""
        return fingerprint(block for name in matrices for block in self._blocks_with_scales(name))

    def _blocks_with_scales(self, name: str) -> Iterator[Tensor]:
        """A matrix, and what a quantiser has stored beside it as `NAME_…`: without scales its numbers are not
        the weight."""
        yield from self.blocks(name)
        for beside in sorted(other for other in self.weight_map if other.startswith(f"{name}_")):
            yield self.tensor(beside).reshape(-1)


def read_config(folder: Path) -> dict[str, Any]:
    """A model folder's config.json, and nothing in the folder that a reader would wait for."""
    if not os.path.isdir(folder):
        raise InPlaceTTTError(f"{folder} is not a model folder.")
    refuse_pipes_in(folder)
    if is_peft_adapter(folder):
        raise InPlaceTTTError(
            f"{folder} is an adapter of PEFT; merge it into its base by `inplace-ttt export {folder} OUT "
            "--format full`, and take OUT."
        )
    values = read_json(folder / CONFIG, f"{folder} is not a model folder")
    known = from_values(_Config, values, str(folder / CONFIG))
    return {**values, **{key: value for key, value in vars(known).items() if key in values}}


def is_peft_adapter(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / PEFT_CONFIG).is_file() and not (Path(path) / CONFIG).exists()


def ttt_config_in(values: Any, file: Path) -> InPlaceTTTConfig:
    """The TTT config that a file holds, layers written out."""
    try:
        config = InPlaceTTTConfig.from_dict(values)
    except InPlaceTTTError as error:
        raise InPlaceTTTError(f"{file}: {error}") from None
    if not isinstance(config.layers, tuple):
        raise InPlaceTTTError(f"{file}: layers must be written out here, got {config.layers!r}.")
    return config


def check_tensors(tensors: LayerTensors, config: InPlaceTTTConfig, name: str) -> None:
    """Refuse TTT tensors that are not those of the config: other layers, other kinds, shapes that do not
    belong together."""
    assert isinstance(config.layers, tuple)
    if sorted(tensors) != list(config.layers):
        raise InPlaceTTTError(
            f"{name} has TTT tensors for layers {sorted(tensors)}, its config names {list(config.layers)}."
        )
    for layer, held in tensors.items():
        if set(held) != kinds(config):
            has, wants = (", ".join(sorted(names)) for names in (held, kinds(config)))
            raise InPlaceTTTError(
                f"{name}: layer {layer} has the TTT tensors {has} where its config wants {wants}; convert "
                "the base again."
            )
        width, taps = (
            held["proj"].shape[-1] if "proj" in held and held["proj"].ndim else 0,
            config.kernel_size,
        )
        wanted = {"proj": [width, width], "conv": [width, 1, taps], "mean": [width], "gain": []}
        if (directions := held.get("keys.directions")) is not None:
            if directions.ndim != 2:
                raise InPlaceTTTError(
                    f"{name}: keys.directions of layer {layer} is {list(directions.shape)}, which is no "
                    "matrix [r, h]."
                )
            rank, inputs = directions.shape
            wanted |= {"keys.centre": [inputs], "write_gate.gate": [rank + 1]}
        for kind, shape in wanted.items():
            if kind in held and list(held[kind].shape) != shape:
                raise InPlaceTTTError(
                    f"{name}: {kind} of layer {layer} is {list(held[kind].shape)} instead of {shape}."
                )
        for kind, tensor in held.items():
            require_numbers(tensor, f"{name}: {kind} of layer {layer}")


def require_numbers(tensor: Tensor, what: str) -> None:
    """Refuse a tensor of a checkpoint that holds codes instead of numbers, or numbers that are not finite."""
    if parameter_dtype(tensor.dtype) != tensor.dtype:
        wanted = "float32, bfloat16 or float16"
        raise InPlaceTTTError(
            f"{what} is stored as {str(tensor.dtype).removeprefix('torch.')}, not as {wanted}; convert the "
            "base again."
        )
    if not tensor.isfinite().all():
        raise InPlaceTTTError(f"{what} holds NaN or infinite numbers; the file is damaged.")


def layer_of(name: str) -> int | None:
    """The layer of a TTT tensor, by its name in a checkpoint."""
    match = _TTT_NAME.search(name)
    return int(match["layer"]) if match else None


def _proved_index(folder: Path) -> dict[str, str]:
    """Tensor -> shard, as the index says, for shards that hold what it says and are as they were linked."""
    index = from_values(
        _Index, read_json(folder / INDEX, f"{folder} has a broken index"), str(folder / INDEX)
    )
    known = recorded(folder)
    for shard in sorted(set(index.weight_map.values())):
        if Path(shard).name != shard:
            raise InPlaceTTTError(f"{folder / INDEX}: {shown(shard)} is no name of a file in the folder.")
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
    """A model of so many layers would take for ever to build, and cannot be the one of these weights."""
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if isinstance(values.get(name), (int, float)) and values[name] > tensors:
                raise InPlaceTTTError(
                    f"{folder / CONFIG} says {name} {shown(values[name])}, its weights are {tensors} tensors."
                )


def kinds(config: InPlaceTTTConfig) -> set[str]:
    """Names of the tensors that a TTT layer adds."""
    of_target = (
        {"gain"} if config.target == "gradient" else {"proj"} if config.conv == "next" else {"conv", "proj"}
    )
    return (
        of_target
        | ({"write_gate.gate"} if config.write_gate else set())
        | ({"mean", "gain"} if config.normalize_targets else set())
        | ({"keys.directions", "keys.centre"} if config.whitening else set())
    )


def parameters_of(tensors: LayerTensors) -> int:
    """Numbers among a conversion's tensors that are trained; the others were measured."""
    return sum(
        pair[kind].numel()
        for pair in tensors.values()
        for kind in ("conv", "proj", "write_gate.gate")
        if kind in pair
    )


def is_folder(source: str | os.PathLike[str]) -> bool:
    """Whether a model is a folder here, or else, by its name, on the hub. Raises InPlaceTTTError for what can
    be neither."""
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
    """Names of the tensors in a safetensors file."""
    require_regular(shard, "it is no safetensors file")
    problem = f"{shard} is missing or not a safetensors file"
    with reported(problem, "download or save it again"), safe_open(shard, framework="pt") as file:
        names = list(file.keys())
    for name in names:
        if len(name) > 1000:
            raise InPlaceTTTError(
                f"{shard} is not a safetensors file of a model: it has a tensor named {shown(name)}."
            )
    return names

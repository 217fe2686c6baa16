"""Checkpoints on disk: read a folder without loading it, write a converted one, load it back.

Conversion moves no weights: the base's shards are linked under a name of their own (a later save into the folder must
not write through the link), one shard with the new tensors is added, and config.json says what was done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import models
from .config import InPlaceTTTConfig
from .errors import InPlaceTTTError
from .families import locate
from .fingerprint import fingerprint
from .folder import link_or_copy, new_folder, save_tensors
from .surgery import SEED, config_of, convert, fast_weights, initial_std
from .zero3 import whole

TTT_SHARD = "inplace_ttt.safetensors"
ADAPTER_CONFIG = "inplace_ttt.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BLOCK_BYTES = 1 << 24
_ADAPTER_FORMAT = 1
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
            weight_map = dict.fromkeys(_keys(folder / _SINGLE), _SINGLE)
        elif (folder / _INDEX).exists():
            weight_map = read_json(folder / _INDEX, f"{source} has a broken index")["weight_map"]
            for shard in sorted(set(weight_map.values())):
                present = set(_keys(folder / shard))
                if lost := sorted(key for key, file in weight_map.items() if file == shard and key not in present):
                    raise InPlaceTTTError(f"{folder / shard} lacks {lost[0]}, which the index names; download the checkpoint again.")
        else:
            raise InPlaceTTTError(f"{source} has no {_SINGLE} and no {_INDEX}; save the model with save_pretrained() first.")
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


@dataclass(frozen=True)
class Plan:
    """What a conversion adds, found on a model without weights. down_proj: TTT layer -> the checkpoint's name of its W0."""

    base_model_type: str
    config: InPlaceTTTConfig
    down_proj: dict[int, str]
    model: PreTrainedModel  # converted, on the meta device


def plan_conversion(checkpoint: Checkpoint, config: InPlaceTTTConfig) -> Plan:
    """Convert the checkpoint's architecture on the meta device: every refusal comes before anything is written."""
    if checkpoint.section is not None:
        raise InPlaceTTTError(f"{checkpoint.name} is converted already; convert its base instead.")
    try:
        base = AutoConfig.from_pretrained(checkpoint.folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(base)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise InPlaceTTTError(f"{checkpoint.name} is not a causal LM that transformers can build: {one_line(error)}") from None
    base_type = base.model_type
    paths = [layer.down_proj_path for layer in locate(model).layers]
    convert(model, config)
    resolved = config_of(model)
    assert isinstance(resolved.layers, tuple)
    return Plan(base_type, resolved, {i: checkpoint.find(f"{paths[i]}.weight") for i in resolved.layers}, model)


def initial_tensors(checkpoint: Checkpoint, plan: Plan) -> LayerTensors:
    """The new tensors of a fresh conversion, in the dtype of W0."""
    tensors: LayerTensors = {}  # those of the extensions are zero, for a calibration to measure
    std = initial_std(plan.model.config)
    for index, module in fast_weights(plan.model).items():
        name = plan.down_proj[index]
        shape, dtype = checkpoint.shape_and_dtype(name)
        if list(shape) != list(module.weight.shape):  # type: ignore[arg-type]
            raise InPlaceTTTError(f"{name} in {checkpoint.name} is {shape}, its config.json says {list(module.weight.shape)}.")  # type: ignore[arg-type]
        target = module.ttt.to_empty(device="cpu").to(dtype if dtype.is_floating_point else torch.bfloat16)
        target.reset_parameters(std, SEED + index)
        tensors[index] = dict(target.state_dict())
    return tensors


def write_full(
    folder: Path,
    checkpoint: Checkpoint,
    plan: Plan,
    tensors: LayerTensors,
    base: Mapping[str, Any],
    keep: Callable[[str], bool] = lambda name: True,
) -> None:
    """A full converted checkpoint: the base's tensors that `keep` admits, the TTT shard, an index over both, the config."""
    named = {
        f"{plan.down_proj[layer].removesuffix('weight')}ttt.{kind}": tensor
        for layer, pair in tensors.items()
        for kind, tensor in pair.items()
    }
    carry_over(checkpoint, folder, keep, named)
    raw = {key: value for key, value in checkpoint.config.items() if key != "auto_map"}
    section = {**models.section(plan.base_model_type, plan.config), "base": dict(base)}
    write_json(folder / "config.json", models.on_disk({**raw, models.MODEL_TYPE: section}))
    models.write_shim(folder)


def carry_over(checkpoint: Checkpoint, folder: Path, keep: Callable[[str], bool], extra: Mapping[str, Tensor]) -> None:
    """Bring a checkpoint's files into `folder`: shards linked, those with tensors to drop rewritten, `extra` as a shard."""
    weight_map: dict[str, str] = {}
    size = 0
    for shard in tqdm(sorted(set(checkpoint.weight_map.values())), desc="shards", file=sys.stderr, disable=None):
        names = [name for name, file in checkpoint.weight_map.items() if file == shard]
        kept = [name for name in names if keep(name)]
        target = folder / (shard if shard.startswith("base-") else f"base-{shard}")
        if len(kept) == len(names):
            link_or_copy(checkpoint.folder / shard, target)
        elif kept:
            save_tensors({name: checkpoint.tensor(name) for name in kept}, target)
        if kept:
            size += target.stat().st_size
            weight_map |= dict.fromkeys(kept, target.name)
    if extra:
        save_tensors(extra, folder / TTT_SHARD)
        size += (folder / TTT_SHARD).stat().st_size
        weight_map |= dict.fromkeys(extra, TTT_SHARD)
    write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})
    for file in checkpoint.folder.iterdir():
        if file.is_file() and file.name not in ("config.json", _INDEX) and _is_companion(file.name):
            shutil.copyfile(file, folder / file.name)


def _is_companion(name: str) -> bool:
    """Tokenizer, generation config, chat template, licence; not the model card, which is about the base."""
    return not name.startswith(".") and (name.endswith((".json", ".txt", ".jinja", ".model")) or name.startswith(("LICENSE", "NOTICE")))


def write_adapter(folder: Path, config: InPlaceTTTConfig, tensors: LayerTensors, base: Mapping[str, Any]) -> None:
    """The adapter form: the TTT tensors, and which base they belong to (name, revision, fingerprint of W0)."""
    flat = {f"{layer}.{kind}": tensor for layer, pair in tensors.items() for kind, tensor in pair.items()}
    save_tensors(flat, folder / TTT_SHARD)
    write_json(folder / ADAPTER_CONFIG, {"format": _ADAPTER_FORMAT, "config": config.to_dict(), "base": dict(base)})


def describe_base(checkpoint: Checkpoint, plan: Plan) -> dict[str, Any]:
    """Which base a conversion stands on."""
    name = str(checkpoint.folder.resolve()) if Path(checkpoint.name).exists() else checkpoint.name
    return {"name_or_path": name, "revision": checkpoint.revision, "fingerprint": checkpoint.fingerprint(plan.down_proj.values())}


def base_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The base that a full checkpoint's TTT tensors can be an adapter for; refuses when training changed W0."""
    base = checkpoint.section and checkpoint.section.get("base")
    if not base or not base.get("fingerprint"):
        raise InPlaceTTTError(f"{checkpoint.name} does not say which base it stands on, so an adapter of it could not be loaded.")
    if checkpoint.fingerprint(checkpoint.down_projections().values()) != base["fingerprint"]:
        raise InPlaceTTTError(
            f"{checkpoint.name} has other down-projections than {base['name_or_path']}, which an adapter would lose; keep it full."
        )
    return dict(base)


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
    for name in _keys(shard):
        layer, _, kind = name.partition(".")
        with safe_open(shard, framework="pt") as file:
            tensors.setdefault(int(layer), {})[kind] = file.get_tensor(name)
    return InPlaceTTTConfig.from_dict(values["config"]), values["base"], tensors


def load(path: str | os.PathLike[str], *, base: str | None = None, **kwargs: Any) -> PreTrainedModel:
    """Load a converted model, in eval mode: a full checkpoint, or an adapter folder onto its base.

    base: another place of an adapter's base. kwargs: as for `AutoModelForCausalLM.from_pretrained` (dtype, device_map, …).
    Raises InPlaceTTTError when the folder is not converted, incomplete, or the base's weights are others.
    """
    if not is_adapter(path):
        if base is not None:
            raise InPlaceTTTError(f"{path} is not an adapter folder, so that base={base!r} has no effect; leave it out.")
        Checkpoint.open(path).ttt_config  # noqa: B018 - refuses what is not converted
        return load_base(path, **kwargs)
    config, described, tensors = read_adapter(path)
    if base is None and described["revision"] is not None:
        kwargs = {"revision": described["revision"], **kwargs}
    model = convert(load_base(base or described["name_or_path"], **kwargs), config)
    layers = fast_weights(model)
    found = fingerprint(whole(module.weight) for module in layers.values() if module.matrix() is not None)  # type: ignore[arg-type]
    if all(module.matrix() is not None for module in layers.values()) and found != described["fingerprint"]:
        raise InPlaceTTTError(
            f"{path} was made for a base with other weights than {base or described['name_or_path']} "
            f"(fingerprint {described['fingerprint'][:12]}…, found {found[:12]}…); load it onto that base."
        )
    if sorted(tensors) != sorted(layers):
        raise InPlaceTTTError(
            f"{path} has tensors for layers {sorted(tensors)}, its config names {sorted(layers)}; write the adapter again."
        )
    for index, layer in layers.items():
        layer.ttt.load_state_dict(tensors[index])
    model.config.inplace_ttt = {**model.config.inplace_ttt, "base": {**described, "name_or_path": base or described["name_or_path"]}}
    return model


def load_base(path: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """A causal LM in eval mode; whatever transformers has against it becomes one sentence."""
    try:
        return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()
    except InPlaceTTTError:
        raise
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise InPlaceTTTError(f"cannot load {path}: {one_line(error)}") from None


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


def _keys(shard: Path) -> list[str]:
    try:
        with safe_open(shard, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise InPlaceTTTError(f"{shard} is missing or not a safetensors file ({one_line(error)}); download or save it again.") from None


def read_json(path: Path, problem: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InPlaceTTTError(f"{problem}: there is no {path}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InPlaceTTTError(f"{problem}: {path} cannot be read ({one_line(error)}).") from None
    if not isinstance(values, dict):
        raise InPlaceTTTError(f"{problem}: {path} is not a JSON object.")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def one_line(error: BaseException) -> str:
    """The first line of an error of somebody else's."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

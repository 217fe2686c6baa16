"""Writes a converted checkpoint without loading its base.

Conversion copies no weights. The base's shards become hard links. The links have new names, since a later
save into the folder must not overwrite the base through a link. One shard with the new tensors is added, and
config.json records the conversion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..config import InPlaceTTTConfig
from ..converted_config import MODEL_TYPE, on_disk, section, write_shim
from ..errors import InPlaceTTTError, reported
from ..families import auto_class, locate
from ..files.folders import link_or_copy, save_tensors
from ..files.json_files import write_json
from ..layer.quantized import parameter_dtype
from ..surgery import SEED, config_of, convert, fast_weights, initial_std
from .companions import copy_companions
from .layer_tensors import LayerTensors
from .names import is_computed, parameters
from .reading import INDEX, TTT_SHARD, Checkpoint, layer_of


@dataclass(frozen=True)
class ConversionPlan:
    """The parts that a conversion adds, determined on a model without weights.

    Attributes:
        base_model_type: the base's model_type.
        config: the TTT config, with the layers as indices.
        down_proj: TTT layer -> the checkpoint's name of its W0.
        model: the converted model on the meta device.
    """

    base_model_type: str
    config: InPlaceTTTConfig
    down_proj: dict[int, str]
    model: PreTrainedModel  # converted, on the meta device


def empty_model(checkpoint: Checkpoint) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """Returns the checkpoint's config, and its model on the meta device, not quantized.

    The model is converted if the config is that of a converted checkpoint.
    """
    with reported(f"{checkpoint.name} is not a causal LM that transformers can build"), torch.device("meta"):
        config = AutoConfig.from_pretrained(checkpoint.folder)
        return config, auto_class(config).from_config(config)


def plan_conversion(checkpoint: Checkpoint, config: InPlaceTTTConfig) -> ConversionPlan:
    """Converts the checkpoint's architecture on the meta device. It raises errors before anything is written.

    Raises:
        InPlaceTTTError: if the checkpoint is already converted, or cannot be converted with this config.
    """
    if checkpoint.section is not None:
        raise InPlaceTTTError(f"{checkpoint.name} is converted already; convert its base instead.")
    base, model = empty_model(checkpoint)
    base_type = base.model_type
    paths = {index: layer.down_proj_path for index, layer in locate(model).layers.items()}
    with reported(f"{checkpoint.name} cannot be converted as its config.json describes it"):
        convert(model, config)
    resolved = config_of(model)
    assert isinstance(resolved.layers, tuple)
    return ConversionPlan(
        base_type,
        resolved,
        down_projections(checkpoint, {i: paths[i] for i in resolved.layers}, model),
        model,
    )


def down_projections(
    checkpoint: Checkpoint, paths: Mapping[int, str], model: PreTrainedModel
) -> dict[int, str]:
    """Returns TTT layer -> the checkpoint's name of its W0.

    Args:
        checkpoint: the base.
        paths: TTT layer -> its down-projection in the converted model.
        model: the converted model.

    Raises:
        InPlaceTTTError: if transformers would not find the new tensors next to W0, or computes W0 from other
            tensors.
    """
    names = checkpoint.names(model)
    found = {layer: names[f"{path}.weight"] for layer, path in paths.items()}
    kind = "gain" if config_of(model).target == "gradient" else "proj"
    new = {layer: f"{name.removesuffix('weight')}ttt.{kind}" for layer, name in found.items()}
    loaded = parameters(new.values(), model)
    for layer, path in paths.items():
        if (
            is_computed(f"{path}.weight", model)
            or loaded[new[layer]] != f"{path}.ttt.{kind}"
            or layer_of(new[layer]) != layer
        ):
            raise InPlaceTTTError(
                f"{checkpoint.name} stores {path}.weight as {found[layer]}, and transformers would not load "
                "new tensors next to that name into "
                f"{path}.ttt; load the model, convert it in memory with inplace_ttt.convert, and save it."
            )
    return found


def initial_tensors(checkpoint: Checkpoint, plan: ConversionPlan) -> LayerTensors:
    """Returns the new tensors of a fresh conversion.

    Their dtype is that of W0, or bfloat16 if W0 has a storage format. Tensors of extensions are zero until
    calibration.
    """
    tensors: LayerTensors = {}
    std = initial_std(plan.model.config)
    for index, module in fast_weights(plan.model).items():
        name = plan.down_proj[index]
        shape, dtype = checkpoint.shape_and_dtype(name)
        expected = list(module.weight.shape)  # type: ignore[arg-type]
        if list(shape) != expected:
            raise InPlaceTTTError(
                f"{name} in {checkpoint.name} is {shape}, but its config.json gives {expected}."
            )
        target = module.ttt.to_empty(device="cpu").to(parameter_dtype(dtype))
        target.reset_parameters(std, SEED + index)
        tensors[index] = dict(target.state_dict())
    return tensors


def write_full(
    folder: Path,
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    tensors: LayerTensors,
    base: Mapping[str, Any],
    keep: Callable[[str], bool] = lambda name: True,
) -> None:
    """Writes a full converted checkpoint: base tensors, a TTT shard, an index over both, and config.json.

    Args:
        folder: existing folder to write into.
        checkpoint: the base.
        plan: the plan of the base's conversion.
        tensors: the new tensors of each TTT layer.
        base: description of the base for config.json.
        keep: returns True for the base's tensors to keep.
    """
    named = {
        f"{plan.down_proj[layer].removesuffix('weight')}ttt.{kind}": tensor
        for layer, pair in tensors.items()
        for kind, tensor in pair.items()
    }
    carry_over(checkpoint, folder, keep, named)
    raw = {key: value for key, value in checkpoint.config.items() if key != "auto_map"}
    about = {**section(plan.base_model_type, plan.config), "base": dict(base)}
    write_json(folder / "config.json", on_disk({**raw, MODEL_TYPE: about}))
    write_shim(folder)


def carry_over(
    checkpoint: Checkpoint, folder: Path, keep: Callable[[str], bool], extra: Mapping[str, Tensor]
) -> None:
    """Copies a checkpoint's files into `folder`.

    Shards are hard-linked. Shards with tensors to drop are rewritten.

    Args:
        checkpoint: the checkpoint to copy from.
        folder: existing folder to write into.
        keep: returns True for tensors to keep.
        extra: tensors for one more shard.
    """
    weight_map: dict[str, str] = {}
    size = 0
    for shard in tqdm(
        sorted(set(checkpoint.weight_map.values())), desc="shards", file=sys.stderr, disable=None
    ):
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
    copy_companions(checkpoint.folder, folder)
    write_json(
        folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    )


def describe_base(checkpoint: Checkpoint, plan: ConversionPlan) -> dict[str, Any]:
    """Returns name or path, revision and fingerprint of the base of a conversion."""
    name = str(checkpoint.folder.resolve()) if Path(checkpoint.name).exists() else checkpoint.name
    return {
        "name_or_path": name,
        "revision": checkpoint.revision,
        "fingerprint": checkpoint.fingerprint(plan.down_proj.values()),
    }

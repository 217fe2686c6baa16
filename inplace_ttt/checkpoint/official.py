"""The public reference implementation's checkpoint format, in and out.

Its config.json has `ttt_mode, ttt_layers, ttt_proj, ttt_lr, ttt_chunk, ttt_target` beside a stock model_type;
its tensors stand beside each MLP's: `ttt_conv.weight` [d, 1, k] and `ttt_proj.weight` [d, d], used
untransposed as here. Forks add keys and tensors of their own; what is not known is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import InPlaceTTTConfig
from ..converted_config import of_the_base
from ..errors import InPlaceTTTError, shown
from ..files.json_files import write_json
from .reading import CONFIG, Checkpoint, LayerTensors, check_tensors, ttt_config_in
from .writing import ConversionPlan, carry_over, plan_conversion

_MODEL_TYPES = ("llama", "qwen3")
KEYS = ("ttt_mode", "ttt_layers", "ttt_proj", "ttt_lr", "ttt_chunk", "ttt_target")
_TARGETS = {"hidden_states": "hidden_states", "input_embed": "embeddings"}
_TENSOR = re.compile(r"\.(?P<layer>\d+)\.mlp\.ttt_(?P<kind>conv|proj)\.weight$")


def is_official_tensor(name: str) -> bool:
    return _TENSOR.search(name) is not None


def refuse_official(path: str, tensors: Iterable[str]) -> None:
    """Refuse to take a checkpoint of the public code for a base, without what its fast weights were trained
    to."""
    if any(map(is_official_tensor, tensors)):
        raise InPlaceTTTError(
            f"{path} has fast weights of the public code, which would be lost; take inplace-ttt "
            "import-official."
        )


def refuse_unknown(checkpoint: Checkpoint, keys: Iterable[str], layers: Iterable[int], whose: str) -> None:
    """Refuse what the import would drop: settings of a fork, and TTT tensors of other kinds or of layers that
    are not named.

    A key without a value (null) sets nothing and passes.

    Args:
        checkpoint: in the public format.
        keys: `ttt_*` keys of config.json that the import maps.
        layers: TTT layers that config.json names.
        whose: code that the format belongs to.
    """
    values, name, named = checkpoint.config, checkpoint.name, set(layers)
    known = set(keys)
    for key in sorted(values):
        if "ttt" in key.lower() and key not in known and values[key] is not None:
            raise InPlaceTTTError(
                f"{name} has {key} {shown(values[key])} in its config.json, which {whose} does not have; "
                "import-official cannot keep what "
                "it changes, so take it out only if its value changes nothing."
            )
    for tensor in sorted(checkpoint.weight_map):
        if "ttt" not in tensor.lower():
            continue
        match = _TENSOR.search(tensor)
        if match is None:
            raise InPlaceTTTError(
                f"{name} has a tensor {tensor}, which {whose} does not have; import-official would lose it."
            )
        if int(match["layer"]) not in named:
            raise InPlaceTTTError(
                f"{name} has {tensor}, and ttt_layers in its config.json does not name layer "
                f"{match['layer']}; take config.json from the "
                "training run."
            )


@dataclasses.dataclass(frozen=True)
class Imported:
    """An official checkpoint, read: the base it stands on, the plan, the tensors under our names, and layers
    it ignored."""

    checkpoint: Checkpoint
    plan: ConversionPlan
    tensors: LayerTensors
    ignored_layers: list[int]


def read_official(checkpoint: Checkpoint) -> Imported:
    """Read an official checkpoint. Layers beyond the model, which its code ignores silently, come back in the
    report."""
    values = checkpoint.config
    if not any(is_official_tensor(name) for name in checkpoint.weight_map):
        raise InPlaceTTTError(
            f"{checkpoint.name} has no ttt_conv or ttt_proj tensors; it is not a checkpoint of the public "
            "code."
        )
    layers, ignored = layers_named(checkpoint)
    target = values.get("ttt_target", "hidden_states")
    if not isinstance(target, str) or target not in _TARGETS:
        raise InPlaceTTTError(
            f"{checkpoint.name} has ttt_target {shown(target)}; known are {', '.join(_TARGETS)}."
        )
    found = {i: _tensors_of(checkpoint, i, bool(values.get("ttt_proj", True))) for i in layers}
    config = ttt_config_in(
        {
            "layers": sorted(layers),
            "chunk_size": values.get("ttt_chunk", 8192),
            "eta": values.get("ttt_lr", 0.3),
            "target": _TARGETS[target],
            "kernel_size": next(iter(found.values()))["conv"].shape[-1],
        },
        checkpoint.folder / CONFIG,
    )
    check_tensors(found, config, checkpoint.name)
    refuse_unknown(checkpoint, KEYS, [*layers, *ignored], "the public code")
    base = dataclasses.replace(
        checkpoint, config={key: value for key, value in values.items() if key not in KEYS}
    )
    plan = plan_conversion(base, config)
    return Imported(base, plan, found, ignored)


def layers_named(checkpoint: Checkpoint) -> tuple[list[int], list[int]]:
    """The TTT layers that a public config.json names: those of the model, and those beyond it."""
    values = checkpoint.config
    if "ttt_layers" not in values:
        raise InPlaceTTTError(
            f"{checkpoint.name} has TTT tensors, but its config.json no ttt_layers; take config.json from "
            "the training run."
        )
    for name in ("ttt_mode", "ttt_proj"):
        if not isinstance(values.get(name, True), bool):
            raise InPlaceTTTError(
                f"{checkpoint.name} has {name} {shown(values[name])}; it must be true or false."
            )
    if values.get("ttt_mode") is False:
        raise InPlaceTTTError(
            f"{checkpoint.name} has ttt_mode false: its code runs it as the plain model; set it to true to "
            "mean otherwise."
        )
    named, count = values["ttt_layers"], values.get("num_hidden_layers")
    if not isinstance(named, list) or not named or not all(type(i) is int and i >= 0 for i in named):
        raise InPlaceTTTError(
            f"{checkpoint.name} has ttt_layers {shown(named)}; it must be a non-empty list of layer indices."
        )
    if type(count) is not int:
        raise InPlaceTTTError(
            f"{checkpoint.name} has num_hidden_layers {shown(count)}; it must be the number of the model's "
            "layers."
        )
    layers = [i for i in named if i < count]
    ignored = [i for i in named if i >= count]
    if not layers:
        raise InPlaceTTTError(
            f"{checkpoint.name} names only layers {ignored}, the model has {count}: its code runs it as "
            "the plain model."
        )
    return layers, ignored


def _tensors_of(checkpoint: Checkpoint, layer: int, has_proj: bool) -> dict[str, Tensor]:
    wanted = [f"{_prefix(layer)}conv.weight"] + [f"{_prefix(layer)}proj.weight"] * has_proj
    if missing := [name for name in wanted if name not in checkpoint.weight_map]:
        raise InPlaceTTTError(
            f"{checkpoint.name} lists TTT layer {layer} but has no {missing[0]}: half a checkpoint."
        )
    conv = checkpoint.tensor(wanted[0])
    if conv.ndim != 3:
        raise InPlaceTTTError(
            f"{checkpoint.name}: {wanted[0]} is {list(conv.shape)}, a convolution is [d, 1, taps]."
        )
    proj = checkpoint.tensor(wanted[1]) if has_proj else torch.eye(conv.shape[0], dtype=conv.dtype)
    return {"conv": conv, "proj": proj}


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.ttt_"


def write_official(folder: Path, checkpoint: Checkpoint) -> None:
    """A converted full checkpoint in the official format; refuses what its code cannot express."""
    config = checkpoint.ttt_config
    assert checkpoint.section is not None
    base_type = checkpoint.section["base_model_type"]
    _refuse_inexpressible(config, base_type)
    tensors = {
        f"{_prefix(layer)}{kind}.weight": tensor
        for layer, pair in checkpoint.ttt_tensors().items()
        for kind, tensor in pair.items()
    }
    carry_over(checkpoint, folder, keep=lambda name: ".ttt." not in name, extra=tensors)
    write_json(folder / "config.json", {**of_the_base(checkpoint.config), **official_keys(config)})


def official_keys(config: InPlaceTTTConfig) -> Mapping[str, Any]:
    """The `ttt_*` keys of the official config.json."""
    target = next(theirs for theirs, ours in _TARGETS.items() if ours == config.target)
    values = (True, list(config.layers), True, config.eta, config.chunk_size, target)
    return dict(zip(KEYS, values, strict=True))


def _refuse_inexpressible(config: InPlaceTTTConfig, base_type: str) -> None:
    reasons = {
        f"its code knows {' and '.join(_MODEL_TYPES)} only, this is a {base_type}": base_type
        not in _MODEL_TYPES,
        "its convolution is symmetric, this one is causal": config.conv == "causal",
        "its targets have a convolution, these have none": config.conv == "next",
        "its targets are made by a convolution, these are loss gradients": config.target == "gradient",
        "it has one eta for all layers, this one has one a layer": isinstance(config.eta, tuple),
        "it has no delta clip": config.clip is not None,
        "it has neither whitened keys nor normalized targets": config.whitening is not None
        or config.normalize_targets,
        "its gradients pass through the target into its source, those of this one do not": config.detach_target,
        "its generated tokens write, those of this one do not": not config.update_on_decode,
    }
    if held := [reason for reason, holds in reasons.items() if holds] + config.rule.beyond_reference_format():
        raise InPlaceTTTError(f"the official format cannot hold this checkpoint: {'; '.join(held)}.")

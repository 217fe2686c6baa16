"""Reads and writes the checkpoint format of the reference code.

Its config.json has `ttt_mode, ttt_layers, ttt_proj, ttt_lr, ttt_chunk, ttt_target`, and a stock model_type.
Each TTT layer's MLP has two more tensors, `ttt_conv.weight` [d, 1, k] and `ttt_proj.weight` [d, d]. Both are
used untransposed, as in this package. Forks add their own keys and tensors. Unknown keys and tensors are
refused.
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
from .layer_tensors import LayerTensors, check_tensors
from .reading import CONFIG, Checkpoint, ttt_config_in
from .writing import ConversionPlan, carry_over, plan_conversion

_MODEL_TYPES = ("llama", "qwen3")
KEYS = ("ttt_mode", "ttt_layers", "ttt_proj", "ttt_lr", "ttt_chunk", "ttt_target")
_TARGETS = {"hidden_states": "hidden_states", "input_embed": "embeddings"}
_TENSOR = re.compile(r"\.(?P<layer>\d+)\.mlp\.ttt_(?P<kind>conv|proj)\.weight$")


def is_reference_tensor(name: str) -> bool:
    return _TENSOR.search(name) is not None


def refuse_reference_format(path: str, tensors: Iterable[str]) -> None:
    """Raises InPlaceTTTError if a checkpoint in the reference format is used as a base.

    Its trained fast weights would be lost.

    Args:
        path: the checkpoint, for the message.
        tensors: names of its tensors.
    """
    if any(map(is_reference_tensor, tensors)):
        raise InPlaceTTTError(
            f"{path} has fast weights of the reference code, which would be lost; run inplace-ttt "
            "import-reference first."
        )


def refuse_unknown(checkpoint: Checkpoint, keys: Iterable[str], layers: Iterable[int], whose: str) -> None:
    """Refuses a checkpoint with settings or tensors that the import would drop.

    Refused are a fork's own settings, TTT tensors of other kinds, and TTT tensors of layers that config.json
    does not name. A key with the value null is accepted, since it sets nothing.

    Args:
        checkpoint: a checkpoint in the reference format.
        keys: `ttt_*` keys of config.json that the import can read.
        layers: TTT layers that config.json names.
        whose: the code whose format it is, for the message.

    Raises:
        InPlaceTTTError: naming the first such key or tensor.
    """
    values, name, named = checkpoint.config, checkpoint.name, set(layers)
    known = set(keys)
    for key in sorted(values):
        if "ttt" in key.lower() and key not in known and values[key] is not None:
            raise InPlaceTTTError(
                f"{name} has {key} {shown(values[key])} in its config.json, which {whose} does not have; "
                "import-reference cannot keep its effect; remove the key only if its value changes nothing."
            )
    for tensor in sorted(checkpoint.weight_map):
        if "ttt" not in tensor.lower():
            continue
        match = _TENSOR.search(tensor)
        if match is None:
            raise InPlaceTTTError(
                f"{name} has a tensor {tensor}, which {whose} does not have; import-reference would lose it."
            )
        if int(match["layer"]) not in named:
            raise InPlaceTTTError(
                f"{name} has {tensor}, but ttt_layers in its config.json does not name layer "
                f"{match['layer']}; use the training run's "
                "config.json."
            )


@dataclasses.dataclass(frozen=True)
class Imported:
    """A checkpoint that was read from the format of another package.

    Attributes:
        checkpoint: the base of the checkpoint, without the `ttt_*` keys.
        plan: the conversion of that base.
        tensors: the new tensors under the names of this package.
        ignored_layers: TTT layers in the checkpoint's config that the model does not have.
    """

    checkpoint: Checkpoint
    plan: ConversionPlan
    tensors: LayerTensors
    ignored_layers: list[int]


def read_reference_format(checkpoint: Checkpoint) -> Imported:
    """Reads a checkpoint in the reference format.

    The reference code silently ignores TTT layers beyond the model's last layer. They are returned in
    `ignored_layers`.

    Raises:
        InPlaceTTTError: if it is not such a checkpoint, or has settings that this package cannot represent.
    """
    values = checkpoint.config
    if not any(is_reference_tensor(name) for name in checkpoint.weight_map):
        raise InPlaceTTTError(
            f"{checkpoint.name} lacks tensors of ttt_conv and ttt_proj; it is not a checkpoint of the "
            "reference code."
        )
    layers, ignored = layers_named(checkpoint)
    target = values.get("ttt_target", "hidden_states")
    if not isinstance(target, str) or target not in _TARGETS:
        raise InPlaceTTTError(
            f"{checkpoint.name} has ttt_target {shown(target)}; it must be one of {', '.join(_TARGETS)}."
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
    refuse_unknown(checkpoint, KEYS, [*layers, *ignored], "the reference code")
    base = dataclasses.replace(
        checkpoint, config={key: value for key, value in values.items() if key not in KEYS}
    )
    plan = plan_conversion(base, config)
    return Imported(base, plan, found, ignored)


def layers_named(checkpoint: Checkpoint) -> tuple[list[int], list[int]]:
    """Returns the TTT layers that a reference config.json names, in two lists.

    The first has the layers that the model has, the second the layers beyond the model's last layer.

    Raises:
        InPlaceTTTError: if the `ttt_*` keys or the number of layers are missing or invalid.
    """
    values = checkpoint.config
    if "ttt_layers" not in values:
        raise InPlaceTTTError(
            f"{checkpoint.name} has TTT tensors, but no ttt_layers in its config.json; use the training "
            "run's config.json."
        )
    for name in ("ttt_mode", "ttt_proj"):
        if not isinstance(values.get(name, True), bool):
            raise InPlaceTTTError(
                f"{checkpoint.name} has {name} {shown(values[name])}; it must be true or false."
            )
    if values.get("ttt_mode") is False:
        raise InPlaceTTTError(
            f"{checkpoint.name} has ttt_mode false, and the reference code then runs the plain model; set "
            "ttt_mode to true to import the fast weights."
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
            f"{checkpoint.name} names only layers {ignored}, but the model has {count} layers; the reference "
            "code then runs the plain model."
        )
    return layers, ignored


def _tensors_of(checkpoint: Checkpoint, layer: int, has_proj: bool) -> dict[str, Tensor]:
    wanted = [f"{_prefix(layer)}conv.weight"] + [f"{_prefix(layer)}proj.weight"] * has_proj
    if missing := [name for name in wanted if name not in checkpoint.weight_map]:
        raise InPlaceTTTError(
            f"{checkpoint.name} lists TTT layer {layer} but lacks {missing[0]}; the checkpoint is incomplete."
        )
    conv = checkpoint.tensor(wanted[0])
    if conv.ndim != 3:
        raise InPlaceTTTError(
            f"{checkpoint.name}: {wanted[0]} is {list(conv.shape)}, but a convolution must be [d, 1, taps]."
        )
    proj = checkpoint.tensor(wanted[1]) if has_proj else torch.eye(conv.shape[0], dtype=conv.dtype)
    return {"conv": conv, "proj": proj}


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.ttt_"


def write_reference_format(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a converted full checkpoint in the reference format.

    Raises:
        InPlaceTTTError: if the reference code cannot represent the checkpoint's settings.
    """
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
    write_json(folder / "config.json", {**of_the_base(checkpoint.config), **reference_format_keys(config)})


def reference_format_keys(config: InPlaceTTTConfig) -> Mapping[str, Any]:
    """Returns the `ttt_*` keys of a config.json in the reference format."""
    target = next(theirs for theirs, ours in _TARGETS.items() if ours == config.target)
    values = (True, list(config.layers), True, config.eta, config.chunk_size, target)
    return dict(zip(KEYS, values, strict=True))


def _refuse_inexpressible(config: InPlaceTTTConfig, base_type: str) -> None:
    reasons = {
        f"its code supports {' and '.join(_MODEL_TYPES)} only, this is a {base_type}": base_type
        not in _MODEL_TYPES,
        "its convolution is symmetric, this one is causal": config.conv == "causal",
        "its targets have a convolution, these do not": config.conv == "next",
        "its targets come from a convolution, these are loss gradients": config.target == "gradient",
        "it has one eta for all layers, this one has one per layer": isinstance(config.eta, tuple),
        "it does not clip updates": config.clip is not None,
        "it has neither whitened keys nor normalized targets": config.whitening is not None
        or config.normalize_targets,
        "its gradients pass through the target into its source, here they do not": config.detach_target,
        "its generated tokens write, here they do not": not config.update_on_decode,
    }
    if held := [reason for reason, holds in reasons.items() if holds] + config.rule.beyond_reference_format():
        raise InPlaceTTTError(f"the reference format cannot hold this checkpoint: {'; '.join(held)}.")

"""Reads checkpoints of TTT-NTP's code (arXiv 2606.21803), in the form that its training writes.

The config.json has `ttt_*` keys and a stock model_type. The only new tensor of a TTT layer is
`mlp.ttt_proj.weight` [d, d], used untransposed. TTT-NTP's evaluation writes the prompt instead of chunks. No
file of the checkpoint records this write or its settings. The defaults of `PromptWrite` are the settings of
TTT-NTP's evaluation script.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from ..errors import InPlaceTTTError, shown
from .layer_tensors import check_tensors
from .reading import CONFIG, Checkpoint, ttt_config_in
from .reference_format import KEYS, Imported, is_reference_tensor, layers_named, refuse_unknown
from .writing import plan_conversion

_MODEL_TYPES = ("qwen3", "llama", "mistral")
_TELLING = ("ttt_predict_mode", "ttt_inner_opt", "ttt_norm_preserve", "ttt_proj_init", "ttt_conv")
_NEEDED = ("ttt_layers", "ttt_lr", "ttt_chunk", "ttt_inner_opt", "ttt_norm_preserve")
_FIXED = {"ttt_target": "hidden_states", "ttt_conv": False, "ttt_predict_mode": "next"}
_WRITE_NORMS = {"sgd": None, "specnorm": "spectral"}


def is_ttt_ntp(checkpoint: Checkpoint) -> bool:
    """Returns True for a checkpoint of TTT-NTP.

    Such a checkpoint has ttt_proj tensors without ttt_conv, and a config.json key that In-Place TTT's code
    does not have.
    """
    kinds = {name.rsplit(".", 2)[-2] for name in checkpoint.weight_map if is_reference_tensor(name)}
    return kinds == {"ttt_proj"} and any(key in checkpoint.config for key in _TELLING)


def read_ttt_ntp(checkpoint: Checkpoint) -> Imported:
    """Reads a TTT-NTP checkpoint.

    Raises:
        InPlaceTTTError: if TTT-NTP's code would not run the checkpoint, or its two packages would run it
            differently.
    """
    values, name = checkpoint.config, checkpoint.name
    if values.get("model_type") not in _MODEL_TYPES:
        raise InPlaceTTTError(
            f"{name} is a {shown(values.get('model_type'))}; TTT-NTP's code supports "
            f"{', '.join(_MODEL_TYPES)} only."
        )
    if missing := [key for key in _NEEDED if key not in values]:
        raise InPlaceTTTError(
            f"{name} lacks {' and '.join(missing)} in its config.json, for which TTT-NTP's two "
            "packages assume different values; "
            "use the training run's config.json."
        )
    for key, only in _FIXED.items():
        if values.get(key, only) != only:
            raise InPlaceTTTError(
                f"{name} has {key} {shown(values[key])}; for TTT-NTP only {shown(only)} is supported."
            )
    if values.get("mlp_bias"):
        raise InPlaceTTTError(
            f"{name} has mlp_bias true, but TTT-NTP's code omits the bias in TTT layers; no such checkpoint "
            "is known."
        )
    optimizer, keeps = values["ttt_inner_opt"], values["ttt_norm_preserve"]
    if not isinstance(optimizer, str) or optimizer not in _WRITE_NORMS:
        raise InPlaceTTTError(
            f"{name} has ttt_inner_opt {shown(optimizer)}; it must be one of {', '.join(_WRITE_NORMS)}."
        )
    if not isinstance(keeps, bool):
        raise InPlaceTTTError(f"{name} has ttt_norm_preserve {shown(keeps)}; it must be true or false.")
    layers, ignored = layers_named(checkpoint)
    tensors = {layer: {"proj": _proj(checkpoint, layer)} for layer in layers}
    settings: dict[str, Any] = {
        "layers": sorted(layers),
        "chunk_size": values["ttt_chunk"],
        "eta": values["ttt_lr"],
        "target": "hidden_states",
        "conv": "next",
        "write_norm": _WRITE_NORMS[optimizer],
        "preserve_row_norms": keeps,
        "prompt_write": {},  # the defaults are the settings of TTT-NTP's evaluation
    }
    config = ttt_config_in(settings, checkpoint.folder / CONFIG)
    check_tensors(tensors, config, name)
    refuse_unknown(checkpoint, {*KEYS, *_TELLING}, [*layers, *ignored], "TTT-NTP's code")
    base = dataclasses.replace(
        checkpoint, config={key: value for key, value in values.items() if not key.startswith("ttt_")}
    )
    return Imported(base, plan_conversion(base, config), tensors, ignored)


def _proj(checkpoint: Checkpoint, layer: int) -> Tensor:
    wanted = f"model.layers.{layer}.mlp.ttt_proj.weight"
    if wanted not in checkpoint.weight_map:
        raise InPlaceTTTError(
            f"{checkpoint.name} lists TTT layer {layer} but lacks {wanted}; the checkpoint is incomplete."
        )
    return checkpoint.tensor(wanted)

"""Loads bases, and computes the fingerprint of the base of a model in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..config import InPlaceTTTConfig
from ..converted_class import refuse_lack
from ..errors import InPlaceTTTError, reported
from ..families import auto_class
from ..layer.zero3 import whole
from ..surgery import fast_weights
from .fingerprint import fingerprint
from .reading import WEIGHTS, Checkpoint, is_folder, read_config
from .reference_format import refuse_reference_format
from .writing import plan_conversion

_OF_CONFIG = ("revision", "trust_remote_code", "token", "cache_dir", "local_files_only", "subfolder")


def fingerprint_of_base(
    model: PreTrainedModel, source: str, revision: str | None, config: InPlaceTTTConfig
) -> str | None:
    """Returns the fingerprint of a loaded base's W0, or None if it cannot be computed.

    If the base is quantized on disk, the fingerprint is computed from its files, since loading may have
    unpacked its weights.

    Args:
        model: the base, converted in memory.
        source: folder or hub id that the base was loaded from.
        revision: the hub revision, if any.
        config: the TTT config, which names the layers with a W0.
    """
    on_disk = Checkpoint.here(source, revision)
    if on_disk is not None and on_disk.config.get("quantization_config"):
        return on_disk.fingerprint(plan_conversion(on_disk, config).down_proj.values())
    weights = [
        None if module.matrix() is None else whole(module.weight)  # type: ignore[arg-type]
        for module in fast_weights(model).values()
    ]
    return (
        None
        if any(weight is None for weight in weights)
        else fingerprint(weight for weight in weights if weight is not None)
    )


def load_base(path: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """Loads a causal LM in eval mode. An error of transformers is raised again as one sentence.

    Args:
        path: model folder or hub id.
        kwargs: arguments for `AutoModelForCausalLM.from_pretrained`.

    Raises:
        InPlaceTTTError: if tensors are missing or have other shapes than config.json states. Also if the
            checkpoint is in the reference code's format, since its fast weights would be dropped.
    """
    if is_folder(path):
        read_config(Path(path))
    anyway = kwargs.pop("ignore_mismatched_sizes", False)
    with reported(f"cannot load {path}"):  # transformers' own error names neither tensor nor shape
        config = kwargs.get("config") or AutoConfig.from_pretrained(
            path, **{key: kwargs[key] for key in _OF_CONFIG if key in kwargs}
        )
        _refuse_more_than_stored(path, config, kwargs.get("trust_remote_code"))
        model, found = auto_class(config).from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    if (others := sorted(found["mismatched_keys"])) and not anyway:
        name, has, wants = others[0]
        more = f" ({len(others) - 1} more differ)" if len(others) > 1 else ""
        raise InPlaceTTTError(
            f"cannot load {path}: {name} is {list(has)}, but its config.json gives {list(wants)}{more}; "
            "use the config and the weights of one checkpoint."
        )
    refuse_lack(model, found["missing_keys"])
    refuse_reference_format(str(path), found["unexpected_keys"])
    return model.eval()


def _refuse_more_than_stored(
    path: str | os.PathLike[str], config: PreTrainedConfig, trust_remote_code: bool | None
) -> None:
    """Raises InPlaceTTTError if config.json describes a far larger model than the weights of its folder.

    transformers would first allocate and initialize every parameter that the files lack.
    """
    # ZeRO-3 shards a model while it is built, and cannot build a model without weights
    if is_deepspeed_zero3_enabled():
        return
    stored = (
        sum(file.stat().st_size for pattern in WEIGHTS for file in Path(path).glob(pattern))
        if os.path.isdir(path)
        else 0
    )
    if not stored:
        return
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > stored * (8 if getattr(config, "quantization_config", None) else 1):
        raise InPlaceTTTError(
            f"cannot load {path}: its config.json describes {parameters:,} parameters, but its weights "
            f"take {stored:,} bytes; use "
            "the config and the weights of one checkpoint."
        )

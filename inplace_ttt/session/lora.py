"""Writes changes of weights as a LoRA adapter in PEFT's format. PEFT itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..checkpoint.reading import PEFT_CONFIG
from ..families import locate
from ..files.folders import save_tensors
from ..files.json_files import write_json
from .weight_change import LowRank

_WEIGHTS = "adapter_model.safetensors"


def write_lora(
    folder: Path, model: PreTrainedModel, factors: Mapping[int, LowRank], base: Mapping[str, Any]
) -> None:
    """Writes an adapter that adds B A to the down-projections of a base.

    Args:
        folder: existing folder to write into.
        model: the base, or a conversion of it.
        factors: layer -> its factors A and B, all of the same rank.
        base: `name_or_path` and `revision` of the base.
    """
    layers, tensors, paths = locate(model).layers, dict[str, Tensor](), list[str]()
    for index, factor in factors.items():
        paths.append(layers[index].down_proj_path)
        for name, tensor in (("lora_A", factor.a), ("lora_B", factor.b)):
            tensors[f"base_model.model.{paths[-1]}.{name}.weight"] = tensor.to("cpu", torch.float32)
    (rank,) = {factor.a.shape[0] for factor in factors.values()}
    save_tensors(tensors, folder / _WEIGHTS)
    write_json(
        folder / PEFT_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base["name_or_path"],
            "revision": base["revision"],
            "target_modules": paths,
            "r": rank,
            "lora_alpha": rank,  # PEFT multiplies B A by lora_alpha / r
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": any(isinstance(layers[index].down_proj, Conv1D) for index in factors),
            "inference_mode": True,
        },
    )

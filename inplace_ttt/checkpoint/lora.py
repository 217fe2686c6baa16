"""What a run with `train: lora` leaves: a PEFT adapter, which holds LoRA, conv and P, of a converted checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel

from ..errors import InPlaceTTTError, reported
from ..files.json_files import read_json
from .reading import PEFT_CONFIG


def base_of(path: str | os.PathLike[str]) -> str:
    """The converted checkpoint that a PEFT adapter names as its base."""
    base = read_json(Path(path) / PEFT_CONFIG, f"{path} is not an adapter of PEFT").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InPlaceTTTError(f"{path}/{PEFT_CONFIG} names no base_model_name_or_path; put the converted checkpoint's folder there.")
    return base


def merged(model: PreTrainedModel, path: str | os.PathLike[str]) -> PreTrainedModel:
    """The converted model with a PEFT adapter's LoRA added to its weights, and the adapter's conv and P in place of its own."""
    try:
        from peft import PeftModel
    except ImportError:
        raise InPlaceTTTError(f"{path} is an adapter of PEFT, which is not installed; pip install 'inplace-ttt[train]'.") from None
    with reported(f"cannot load {path}"):
        return PeftModel.from_pretrained(model, str(path)).merge_and_unload().eval()

"""The packing of a frozen base in 4 or 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from .recipe.sections import Model


def quantization(model: Model) -> Any:
    """Returns the config of bitsandbytes for `model.load_in`."""
    from transformers import BitsAndBytesConfig

    if model.load_in == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    dtype = getattr(torch, model.dtype)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )

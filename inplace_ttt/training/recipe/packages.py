"""Checks that the packages a recipe needs are installed, before anything is loaded or started."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers.utils import is_flash_attn_2_available, is_kernels_available, is_liger_kernel_available

from ...errors import InPlaceTTTError, how_to_install
from .recipe import Recipe

_NEEDED = ("accelerate", "datasets", "deepspeed", "peft", "yaml")


def check_packages(recipe: Recipe) -> None:
    """Raises InPlaceTTTError if a package or device that the recipe needs is missing."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise InPlaceTTTError(f"training needs {', '.join(missing)}; {how_to_install('train')}.")
    if recipe.model.load_in is not None and find_spec("bitsandbytes") is None:
        raise InPlaceTTTError(
            "model.load_in needs bitsandbytes, which is not installed; pip install it, or leave load_in out."
        )
    for name in recipe.monitor.report_to:
        if find_spec(name) is None:
            raise InPlaceTTTError(
                f"monitor.report_to names {name}, which is not installed; pip install {name}, or leave it "
                "out."
            )
    if recipe.training.liger and not is_liger_kernel_available():
        raise InPlaceTTTError(
            "training.liger needs liger-kernel, which is not installed; pip install it, or set false."
        )
    flash = is_flash_attn_2_available() or (torch.cuda.is_available() and is_kernels_available())
    if recipe.model.attn_implementation == "flash_attention_2" and not flash:
        raise InPlaceTTTError(
            "model.attn_implementation is flash_attention_2, which needs the package flash-attn and a CUDA "
            "device; install it, or set sdpa."
        )

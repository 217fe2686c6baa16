"""The model of a NeMo Automodel YAML: `_target_: inplace_ttt.clients.automodel.from_pretrained` in its
section `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..checkpoint.loading import load_base
from .settings import prepare, settings_of


def from_pretrained(
    pretrained_model_name_or_path: str, ttt: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """A converted model for Automodel's recipe, which puts its own infrastructure (PEFT, sharding,
    compilation) around it afterwards.

    ttt: what is converted and how, as in a recipe of ours; none for a folder that is converted already.
    options: for `AutoModelForCausalLM.from_pretrained`.
    Raises InPlaceTTTError for settings that cannot be, and for weights that cannot be loaded whole.
    """
    settings = settings_of({} if ttt is None else {"ttt": ttt})
    return prepare(load_base(pretrained_model_name_or_path, **options), settings.ttt)

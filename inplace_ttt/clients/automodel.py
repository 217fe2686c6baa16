"""Builds the model for NeMo Automodel.

Automodel's YAML names the function in its section `model`:
`_target_: inplace_ttt.clients.automodel.from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..checkpoint.loading import load_base
from .settings import prepare, settings_of


def from_pretrained(
    pretrained_model_name_or_path: str, ttt: Mapping[str, Any] | None = None, **options: Any
) -> nn.Module:
    """Loads a converted model for Automodel's recipe, which adds PEFT, sharding and compilation afterwards.

    Args:
        pretrained_model_name_or_path: model folder or hub id.
        ttt: settings of the conversion, as in a recipe of this package; None for a folder that is already
            converted.
        options: arguments for `AutoModelForCausalLM.from_pretrained`.

    Returns:
        The converted model.

    Raises:
        InPlaceTTTError: if the settings are invalid, missing, without effect on a converted folder, or in
            need of calibration. Also if the weights cannot be loaded completely.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt.clients.automodel import from_pretrained
        >>> from inplace_ttt.surgery import config_of
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> AutoModelForCausalLM.from_config(small).save_pretrained("small-base")
        >>> config_of(from_pretrained("small-base", ttt={"layers": [1], "chunk_size": 64})).layers
        (1,)
    """
    settings = settings_of({} if ttt is None else {"ttt": ttt})
    return prepare(load_base(pretrained_model_name_or_path, **options), settings.ttt)

"""The settings of `model.generate` that a session allows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError, shown

_GOES_ON_AS_ONE = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "use_cache": True,
    "cache_implementation": None,
    "assistant_model": None,  # the first step of assisted generation ignores the tokens that a cache has read
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "use_mtp": False,
}
"""Settings of `model.generate` under which a session keeps one cache and one sequence per row."""


def check_settings(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Checks the arguments for `model.generate`, and removes an attention mask without padding.

    Args:
        model: the session's model.
        kwargs: the arguments.

    Raises:
        InPlaceTTTError: if a setting does not work with a session, or the mask has padding.
    """
    settings = kwargs.get("generation_config") or model.generation_config
    for name, wanted in _GOES_ON_AS_ONE.items():
        if (asked := kwargs.get(name, getattr(settings, name, None))) not in (None, wanted):
            raise InPlaceTTTError(
                "a session continues one sequence of tokens per row, in its own cache; remove "
                f"{name}={shown(asked)} from the "
                "arguments and from generation_config.json, or use model.generate."
            )
    if (mask := kwargs.pop("attention_mask", None)) is not None and not bool(torch.as_tensor(mask).all()):
        raise InPlaceTTTError(
            "a session's rows cannot hold padding; give token ids of one length, or one session per row."
        )

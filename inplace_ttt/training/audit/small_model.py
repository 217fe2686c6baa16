"""A narrow model that replaces a recipe's model in the audit: same kind, settings and depth."""

from __future__ import annotations

import copy
import dataclasses
import math

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention_window import set_attention_window
from ...calibration.calibrate import calibrate
from ...config import InPlaceTTTConfig
from ...converted_config import unmarked
from ...families import auto_class
from ...surgery import convert
from ..model import planned_architecture
from ..recipe.recipe import Recipe
from ..ulysses import attention_heads

_WIDTHS = ("hidden_size", "intermediate_size", "ffn_dim", "num_attention_heads", "num_key_value_heads")
_LEAST_WIDTH, _VOCABULARY, _CALIBRATION_TOKENS = 64, 1024, 512


def small_model(recipe: Recipe) -> PreTrainedModel:
    """Returns a converted model on the CPU, in the recipe's dtype, with random weights.

    The audit measures properties of code and settings, which do not depend on the weights or their width. A
    narrow model takes seconds and megabytes; an 8B model would take minutes and tens of gigabytes. No
    weights, no network and no device are needed. Flash attention needs a device, so it is replaced by sdpa;
    eager stays.

    Raises:
        InPlaceTTTError: if the recipe's model config cannot be read.
    """
    config, ttt = planned_architecture(recipe)
    ttt = ttt or InPlaceTTTConfig.from_dict(config.inplace_ttt["config"])
    config, factor = _narrowed(unmarked(config))
    attention = "eager" if recipe.model.attn_implementation == "eager" else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dtype, narrow = getattr(torch, recipe.model.dtype), _narrowed_ttt(ttt, factor)
        made = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
        model = convert(made.eval(), narrow)
        if ttt.needs_calibration:
            rank = 0 if narrow.whitening is None else narrow.whitening.rank
            tokens = max(_CALIBRATION_TOKENS, 2 * rank if isinstance(rank, int) else 0)
            calibrate(model, [torch.randint(config.get_text_config().vocab_size, (1, tokens))])
    if recipe.model.window is not None:
        set_attention_window(model, recipe.model.window.size, recipe.model.window.sinks)
    return model


def _narrowed(config: PreTrainedConfig) -> tuple[PreTrainedConfig, int]:
    """Returns the config with every width divided by the same number, and that number.

    The size of a head, and the number of query heads per key-value head, do not change.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    widths = {name: value for name in _WIDTHS if isinstance(value := getattr(text, name, None), int)}
    common = math.gcd(attention_heads(text)[1], *widths.values())
    shared = [f for f in range(1, common + 1) if common % f == 0]
    factor = max(f for f in shared if f == 1 or text.hidden_size // f >= _LEAST_WIDTH)
    for name, value in widths.items():
        setattr(text, name, value // factor)
    if text.vocab_size > _VOCABULARY:
        text.vocab_size = _VOCABULARY
        text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    return config, factor


def _narrowed_ttt(ttt: InPlaceTTTConfig, factor: int) -> InPlaceTTTConfig:
    """Divides the rank of whitening, which is a width too. A rank given as a fraction is left as it is."""
    if ttt.whitening is None or not isinstance(ttt.whitening.rank, int):
        return ttt
    rank = max(1, ttt.whitening.rank // factor)
    return dataclasses.replace(ttt, whitening=dataclasses.replace(ttt.whitening, rank=rank))

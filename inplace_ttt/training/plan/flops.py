"""Counts the operations of a micro-step from shapes alone: those of the model, and those that TTT adds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ...families import attention_kinds, causal_lm, features, locate
from ...surgery import config_of, fast_weights
from ..recipe.recipe import Recipe
from ..ulysses import attention_heads

_PEAKS = {
    "B200": 2250,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
}
"""Peak speed of devices, in 10¹² operations per second.

The values are for dense bfloat16 products with float32 sums. A key is a part of a device's name; the first
match counts.
"""


def model_flops(recipe: Recipe, model: nn.Module) -> int:
    """Returns the operations of one device's micro-step, forward and backward, without recomputation.

    The count does not depend on the way the model is computed. A linear map needs 2 operations per token and
    weight, and as many for each gradient. Its weight has a gradient if it is trained, and its input if
    an earlier parameter is trained. Only the experts chosen for a token count. Routers are left out. The
    teacher of `training.distillation` takes one more forward, without TTT.

    Args:
        recipe: the run's recipe.
        model: the recipe's model, on any device.
    """
    text, tokens, linear, learns = model.config.get_text_config(), tokens_of(recipe), 0, False  # type: ignore[union-attr, operator]
    forwards = 1 if recipe.training.distillation is None else 2
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, (nn.Linear, Conv1D)):
            linear += 2 * tokens * module.weight.numel() * (forwards + learns + module.weight.requires_grad)
        elif experts := getattr(module, "num_experts", None):
            maps = [parameter for parameter in own if parameter.dim() == 3]
            linear += sum(
                2
                * tokens
                * w.numel()
                * text.num_experts_per_tok
                // experts
                * (forwards + learns + w.requires_grad)
                for w in maps
            )
        learns = learns or any(parameter.requires_grad for parameter in own)
    return (
        linear
        + attention_flops(recipe, text, forwards + 2)
        + fast_weight_flops(recipe, model, again=0)
        + _finding_targets(recipe, model)
    )


def _finding_targets(recipe: Recipe, model: nn.Module) -> int:
    """Returns the operations of finding targets with `target: gradient`, else 0.

    Finding them takes one more forward, and a backward of the activations from the loss to the lowest TTT
    layer.
    """
    if config_of(model).target != "gradient":
        return 0
    lm = causal_lm(model)
    blocks, lowest = locate(lm).blocks, min(fast_weights(model))
    above = {module for block in blocks[lowest:] for module in block.modules()} | {lm.get_output_embeddings()}
    maps = [module for module in lm.modules() if isinstance(module, (nn.Linear, Conv1D))]
    weights = sum(module.weight.numel() * (2 if module in above else 1) for module in maps)
    return int(2 * tokens_of(recipe) * weights * _share_read(recipe, model)) + attention_of_targets(
        recipe, model
    )


def attention_of_targets(recipe: Recipe, model: nn.Module) -> int:
    """Returns the operations of attention for finding targets with `target: gradient`."""
    if config_of(model).target != "gradient":
        return 0
    lm = causal_lm(model)
    blocks = len(locate(lm).blocks)
    above = (blocks - min(fast_weights(model))) / blocks
    return int(
        attention_flops(recipe, lm.config.get_text_config(), 1) * (1 + 2 * above) * _share_read(recipe, model)
    )


def _share_read(recipe: Recipe, model: nn.Module) -> float:
    """Returns the fraction of a row's tokens in chunks whose writes later tokens read."""
    length, chunk = recipe.data.sequence_length, config_of(model).chunk_size
    return (length - 1) // chunk * chunk / length


def tokens_of(recipe: Recipe) -> int:
    """Returns the tokens per device and micro-step."""
    return recipe.training.batch_size * recipe.data.sequence_length // recipe.parallel.sequence_parallel_size


def fast_weight_sizes(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Returns (d, h) of each TTT layer."""
    return tuple(features(layer)[::-1] for layer in fast_weights(model).values())


def attention_flops(recipe: Recipe, text: PreTrainedConfig, passes: int) -> int:
    """Returns the operations of attention scores and values in one device's micro-step.

    Args:
        recipe: the run's recipe. Each row counts as one document.
        text: config of the text model.
        passes: number of passes. A backward counts as two.
    """
    heads, _ = attention_heads(text)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    length, window = recipe.data.sequence_length, getattr(text, "sliding_window", None)
    pairs = 0
    for kind in attention_kinds(text):
        reach = min(window, length) if window and kind == "sliding_attention" else length
        pairs += length * reach - reach * (reach - 1) // 2
    return (
        4
        * width
        * heads
        * pairs
        * passes
        * recipe.training.batch_size
        // recipe.parallel.sequence_parallel_size
    )


def fast_weight_flops(recipe: Recipe, model: nn.Module, again: int) -> int:
    """Returns the operations that TTT adds to the products of one device's micro-step.

    These are the products of keys, writes, reads of the state and P, forward and backward.

    Args:
        recipe: the run's recipe.
        model: the converted model, on any device.
        again: 1 if the forward is recomputed, else 0. Recomputation skips a plain linear map at a layer's
            end, but repeats all of TTT.
    """
    config, forwards, total = config_of(model), 1 + again, 0.0
    for d, h in fast_weight_sizes(model):
        width = config.state_shape(d, h)[1]
        of_keys = 0 if config.whitening is None else (forwards + 1) * width * h  # directions are not trained
        in_one_product = config.whitening is None and recipe.model.dtype == "float32"
        of_state = config.rule.multiply_adds(
            d, width, config.chunk_size, forwards, in_one_product=in_one_product
        )
        of_proj = 0 if config.target == "gradient" else (forwards + 2) * d * d
        total += of_keys + of_state + again * d * h + of_proj
    return int(2 * tokens_of(recipe) * total)


def device_peak(recipe: Recipe) -> float | None:
    """Returns the peak speed of this process's device in operations per second, in the recipe's dtype.

    Returns None if it is unknown.
    """
    if recipe.model.dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    name: Any = torch.cuda.get_device_name()
    return next((1e12 * peak for part, peak in _PEAKS.items() if part in name), None)

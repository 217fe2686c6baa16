"""Turns down-projections of a model into fast weights, finds them, and turns them back."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from ..errors import InPlaceTTTError
from ..families import DecoderLayer, features
from .fast_linear import FastWeight, fast_class, plain_class
from .hooks import LayerHooks, ModelHooks
from .settings import LayerSettings
from .target import target_generator
from .zero3 import gathered


def fast_weights(model: nn.Module) -> dict[int, FastWeight]:
    """Finds the fast-weight down-projections of a converted model.

    Args:
        model: any model.

    Returns:
        The down-projections by layer index, in order; empty if the model is not converted. Their submodule
        `ttt` has the parameters conv [d, 1, k] and proj, which is P [d, d].

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import convert
        >>> from inplace_ttt.surgery import fast_weights
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=8)
        >>> model = convert(AutoModelForCausalLM.from_config(small)).requires_grad_(False)
        >>> for layer in fast_weights(model).values():
        ...     _ = layer.ttt.requires_grad_(True)  # train the target generators alone
        >>> list(fast_weights(model))
        [0, 6]
    """
    return {m.fast.layer: m for m in model.modules() if isinstance(m, FastWeight)}


def hooks_of(model: nn.Module) -> set[ModelHooks]:
    """Returns the hooks of all converted models inside `model`."""
    return {layer.hooks.model for layer in fast_weights(model).values()}


def check(parts: DecoderLayer) -> None:
    """Checks that a down-projection can become a fast weight, before any layer is changed.

    Raises:
        InPlaceTTTError: if the module is not a linear map, is offloaded, or its forward was replaced.
    """
    down = parts.down_proj
    features(down)
    if hasattr(down, "_hf_hook") and any(p.device.type == "meta" for p in down.parameters()):
        raise InPlaceTTTError(
            f"{parts.down_proj_path} is offloaded, so its new parameters would lack a device; convert before "
            "offloading."
        )
    if "forward" in down.__dict__ and "_old_forward" not in down.__dict__:
        raise InPlaceTTTError(
            f"something replaced the forward of {parts.down_proj_path}, and the fast weight would bypass the "
            "replacement; undo that."
        )


def install(
    parts: DecoderLayer,
    settings: LayerSettings,
    model: ModelHooks,
    *,
    dtype: torch.dtype,
    std: float,
    seed: int,
) -> None:
    """Turns a decoder layer's down-projection into a fast weight, in place, and hooks its attention and MLP.

    Args:
        parts: the modules of the decoder layer.
        settings: the layer's index and settings.
        model: the hooks of the model.
        dtype: dtype of the new parameters.
        std: standard deviation of P's diagonal.
        seed: seed of P's diagonal.
    """
    down, config = parts.down_proj, settings.config
    weight = next(down.parameters())
    width, dim = features(down)
    factory: dict[str, Any] = {"device": weight.device, "dtype": dtype}
    target = target_generator(config, width, dim, **factory)
    if weight.device.type != "meta":
        with gathered(target.parameters()):
            target.reset_parameters(std, seed)
    plain: type = type(down)
    _become(down, fast_class(plain))
    hooks = LayerHooks(settings.layer, model)
    down.ttt, down.fast, down.hooks = target, settings, hooks  # type: ignore[assignment]
    hooks.attach(parts.attention, parts.mlp if config.target == "hidden_states" else None)


def remove(down: FastWeight) -> None:
    """Undoes `install`: restores the module's class and leaves its weight unchanged."""
    down.hooks.detach()
    del down.ttt, down.fast, down.hooks
    _become(down, plain_class(down))


def _become(module: nn.Module, new: type[nn.Module]) -> None:
    """Changes a module's class in place, also inside the hook that accelerate puts around its forward."""
    module.__class__ = new
    if "_old_forward" in module.__dict__:
        module._old_forward = types.MethodType(new.forward, module)  # type: ignore[assignment]

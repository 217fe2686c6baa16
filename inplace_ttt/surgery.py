"""Conversion of a loaded model, and back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig

from . import gradient_reading
from .config import InPlaceTTTConfig
from .converted_config import mark, unmark
from .errors import InPlaceTTTError, one_line
from .families import causal_lm, is_listed, locate
from .layer.fast_linear import FastWeight, LayerSettings, check, fast_weights, hooks_of, install, remove
from .layer.hooks import ModelHooks, sharing, switching
from .layer.quantised import parameter_dtype
from .layer.zero3 import is_partitioned

logger = logging.getLogger(__name__)

AnyModel = TypeVar("AnyModel", bound=nn.Module)

SEED = 0
"""Layer i draws its P from seed SEED + i."""


def convert(model: AnyModel, config: InPlaceTTTConfig | None = None) -> AnyModel:
    """Give a loaded causal LM fast weights, in place; the model computes what it did before (paper appendix
    C.3).

    config: an `InPlaceTTTConfig`; the `paper` preset without one. The model may be quantised.
    Returns the model. Raises InPlaceTTTError for layers that do not exist or have routed experts alone, what
    is no causal LM, and models that are converted already or wrapped by PEFT; a model that it refuses is as
    it was.
    """
    lm = causal_lm(model)
    if is_converted(lm):
        raise InPlaceTTTError(f"this {type(lm).__name__} is converted already; revert(model) first.")
    if getattr(model, "peft_config", None):
        raise InPlaceTTTError(
            "PEFT would save this model's adapter without the new parameters; convert the base first, then "
            "wrap it, with "
            'modules_to_save=["ttt"] in its config.'
        )
    decoder = locate(lm)
    decoder.say_how_found()
    config = (config or InPlaceTTTConfig()).resolve(len(decoder.blocks))
    indices = config.layers
    assert isinstance(indices, tuple)
    decoder.check_dense(indices)
    for index in indices:
        check(decoder.layers[index])
    if config.target == "gradient" and getattr(lm.config, "vision_config", None) is not None:
        raise InPlaceTTTError(
            "target='gradient' reads text alone, and this model reads images too; choose another target."
        )
    _warn_if_nothing_reads(config, lm.config.get_text_config())
    std = initial_std(lm.config)
    hooks = ModelHooks(decoder.base, list(indices))
    for position, index in enumerate(indices):
        settings = LayerSettings(index, config, config.eta_of(position))
        install(
            decoder.layers[index],
            settings,
            hooks,
            dtype=parameter_dtype(lm.dtype),
            std=std,
            seed=SEED + index,
        )
    hooks.attach(
        decoder.base,
        decoder.blocks[0],
        [attention for i, attention in enumerate(decoder.attentions) if i not in indices],
    )
    if config.target == "gradient":
        gradient_reading.install(lm, decoder.base)
    mark(lm.config, config)
    if not is_listed(decoder.base) and not any(p.is_meta or is_partitioned(p) for p in lm.parameters()):
        try:
            check_behaviour(model)
        except InPlaceTTTError:
            revert(model)
            raise
    return model


@torch.no_grad()
def check_behaviour(model: nn.Module) -> None:
    """Refuse a converted model that two short rows show to be no causal LM, or no one whose layers the fast
    weight can follow.

    Raises InPlaceTTTError when a later token or another row changes a logit by more than 1e-3 of the largest.
    """
    lm = causal_lm(model)
    training = {module: module.training for module in lm.modules()}
    config = config_of(lm)
    length = (
        8 if config.target != "gradient" else min(8, config.chunk_size - 1)
    )  # of a gradient's, no chunk may end: nothing is measured yet
    ids = (
        torch.arange(4, 4 + 2 * length, device=lm.device).view(2, length)
        % lm.config.get_text_config().vocab_size
    )
    later, beside = ids.clone(), ids.clone()
    later[:, -1], beside[1] = ids[:, 0], ids[1].flip(0)
    try:
        expected, with_later, with_beside = (
            lm.eval()(input_ids=rows, use_cache=False).logits.float() for rows in (ids, later, beside)
        )
    except InPlaceTTTError:
        raise
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        AssertionError,
        IndexError,
        KeyError,
    ) as error:
        raise InPlaceTTTError(
            f"{type(lm).__name__} does not read a batch of token ids alone ({one_line(error)})."
        ) from None
    finally:
        for module, mode in training.items():
            module.training = mode
    bound = 1e-3 * expected.abs().max()
    if (expected - with_later)[:, :-1].abs().max() > bound:
        raise InPlaceTTTError(
            f"in {type(lm).__name__} tokens see later ones, which would write what is to be predicted; it "
            "is no causal LM."
        )
    if (expected - with_beside)[0].abs().max() > bound:
        raise InPlaceTTTError(
            f"in {type(lm).__name__} a row's logits depend on the other rows, so that memories would mix."
        )


def initial_std(config: PreTrainedConfig) -> float:
    """Standard deviation of P's diagonal at the start: the model's initializer range (paper appendix C.3)."""
    return getattr(config.get_text_config(), "initializer_range", None) or 0.02


def revert(model: AnyModel) -> AnyModel:
    """Take the fast weights out again, in place: every parameter of the base is what it is now, and nothing
    is left."""
    lm = causal_lm(model)
    layers = fast_weights(lm)
    if not layers:
        raise InPlaceTTTError(f"this {type(lm).__name__} is not converted; there is nothing to revert.")
    for hooks in hooks_of(lm):
        hooks.detach()
    for layer in layers.values():
        remove(layer)
    gradient_reading.remove(locate(lm).base)
    unmark(lm.config)
    return model


def is_converted(model: nn.Module) -> bool:
    return any(isinstance(module, FastWeight) for module in model.modules())


def config_of(model: nn.Module) -> InPlaceTTTConfig:
    """The TTT config of a converted model, layers written out."""
    for module in model.modules():
        if isinstance(module, FastWeight):
            return module.fast.config
    raise InPlaceTTTError(
        f"this {type(model).__name__} is not converted; convert(model, config) it, or load a converted "
        "checkpoint."
    )


def refuse_gradient_target(model: nn.Module, what: str) -> None:
    """Raise InPlaceTTTError where a model's targets are loss gradients, for `what` cannot be done with them
    yet."""
    if config_of(model).target == "gradient":
        raise InPlaceTTTError(
            f"a model with target='gradient' cannot be {what} yet; `inplace-ttt evaluate` says whether its "
            "writes help."
        )


@contextmanager
def disable_ttt(model: nn.Module) -> Iterator[None]:
    """Within it the model reads with W0 alone and writes nothing, in this thread: the same weights, TTT
    off."""
    with switching(hooks_of(model), enabled=False):
        yield


@contextmanager
def share_sequence(model: nn.Module, group: ProcessGroup) -> Iterator[None]:
    """Within it each rank of `group` calls the converted model with its contiguous, equal part of the same
    rows.

    Attention must see the other parts by its own means (Ulysses); only the fast weight is handled here. Not
    needed for training under DeepSpeed's Ulysses, whose group is found by itself.
    """
    with sharing(hooks_of(model), group):
        yield


def _warn_if_nothing_reads(config: InPlaceTTTConfig, text: Any) -> None:
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and config.chunk_size >= context:
        _warn_once(
            f"a chunk of {config.chunk_size} tokens is no shorter than the model's context of {context}: "
            "nothing would ever "
            "read a write; lower the chunk size"
        )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)

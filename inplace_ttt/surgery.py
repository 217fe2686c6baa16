"""Conversion of a loaded model, and its reversal."""

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
from .converted_config import marked, unmarked
from .errors import InPlaceTTTError, one_line
from .families import causal_lm, is_listed, locate
from .layer.fast_linear import FastWeight
from .layer.hooks import ModelHooks, sharing, switching
from .layer.installing import check, fast_weights, hooks_of, install, remove
from .layer.quantized import parameter_dtype
from .layer.settings import LayerSettings
from .layer.zero3 import is_partitioned

logger = logging.getLogger(__name__)

AnyModel = TypeVar("AnyModel", bound=nn.Module)

SEED = 0
"""Layer i draws its P from seed SEED + i."""


def convert(model: AnyModel, config: InPlaceTTTConfig | None = None) -> AnyModel:
    """Adds fast weights to a loaded causal LM, in place (paper §3.1, §3.2).

    The converted model computes the same outputs as before (paper appendix C.3), except with conv="next" or
    target="gradient". If `config.needs_calibration` is True, call `calibrate` next.

    Args:
        model: a causal LM of transformers, which may be quantized.
        config: the TTT config; the preset `paper` if None.

    Returns:
        The same model.

    Raises:
        InPlaceTTTError: if the model is not a causal LM, is converted already, or is wrapped by PEFT. Also if
            a layer does not exist or has only routed experts, or if target="gradient" meets a model that
            reads images. A refused model is unchanged.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=8)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> model.model.layers[6].mlp.down_proj.ttt.conv.shape
        torch.Size([64, 1, 5])
    """
    lm = causal_lm(model)
    if is_converted(lm):
        raise InPlaceTTTError(f"this {type(lm).__name__} is converted already; revert(model) first.")
    if getattr(model, "peft_config", None):
        raise InPlaceTTTError(
            "PEFT would save this model's adapter without the new parameters; convert the base first, then "
            'wrap it with a PEFT config that has modules_to_save=["ttt"].'
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
            "target='gradient' reads text alone, but this model reads images too; choose another target."
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
    _replace_config(model, lm.config, marked(lm.config, config))
    if not is_listed(decoder.base) and not any(p.is_meta or is_partitioned(p) for p in lm.parameters()):
        try:
            check_behavior(model)
        except InPlaceTTTError:
            revert(model)
            raise
    return model


@torch.no_grad()
def check_behavior(model: nn.Module) -> None:
    """Checks on two short rows that a converted model is causal and keeps rows apart.

    Raises:
        InPlaceTTTError: if a later token or another row changes a logit by more than 1e-3 of the largest, or
            the model does not read a batch of token ids.
    """
    lm = causal_lm(model)
    training = {module: module.training for module in lm.modules()}
    config = config_of(lm)
    length = (
        8 if config.target != "gradient" else min(8, config.chunk_size - 1)
    )  # with target="gradient" no chunk may end, since its scale is not measured yet
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
            f"in {type(lm).__name__} tokens see later ones, so writes would contain the tokens to be "
            "predicted; use a causal LM."
        )
    if (expected - with_beside)[0].abs().max() > bound:
        raise InPlaceTTTError(
            f"in {type(lm).__name__} a row's logits depend on the other rows, so their states would mix."
        )


def initial_std(config: PreTrainedConfig) -> float:
    """Returns the standard deviation of the initial diagonal of P.

    This is the model's initializer range (paper appendix C.3).
    """
    return getattr(config.get_text_config(), "initializer_range", None) or 0.02


def revert(model: AnyModel) -> AnyModel:
    """Removes the fast weights of a model, in place.

    The parameters of the base keep their current values.

    Args:
        model: a converted model.

    Returns:
        The same model.

    Raises:
        InPlaceTTTError: if the model is not converted.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import convert, revert
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = revert(convert(AutoModelForCausalLM.from_config(small)))
        >>> any(".ttt." in name for name, _ in model.named_parameters())
        False
    """
    lm = causal_lm(model)
    layers = fast_weights(lm)
    if not layers:
        raise InPlaceTTTError(f"this {type(lm).__name__} is not converted; there is nothing to revert.")
    for hooks in hooks_of(lm):
        hooks.detach()
    for layer in layers.values():
        remove(layer)
    gradient_reading.remove(locate(lm).base)
    _replace_config(model, lm.config, unmarked(lm.config))
    return model


def _replace_config(model: nn.Module, old: PreTrainedConfig, new: PreTrainedConfig) -> None:
    """Replaces a config in all modules that share it. Other models may share it too, and keep it."""
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new


def is_converted(model: nn.Module) -> bool:
    return any(isinstance(module, FastWeight) for module in model.modules())


def config_of(model: nn.Module) -> InPlaceTTTConfig:
    """Reads the TTT config of a converted model.

    Args:
        model: a converted model, which may be wrapped.

    Returns:
        The config, with explicit layer indices.

    Raises:
        InPlaceTTTError: if the model is not converted.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import convert
        >>> from inplace_ttt.surgery import config_of
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=8)
        >>> config_of(convert(AutoModelForCausalLM.from_config(small))).layers
        (0, 6)
    """
    for module in model.modules():
        if isinstance(module, FastWeight):
            return module.fast.config
    raise InPlaceTTTError(
        f"this {type(model).__name__} is not converted; convert(model, config) it, or load a converted "
        "checkpoint."
    )


@contextmanager
def disable_ttt(model: nn.Module) -> Iterator[None]:
    """Switches TTT off for this thread inside the `with` block: the model reads W0, and writes nothing.

    Args:
        model: a converted model. Any other model is left unchanged.

    Returns:
        A context manager, which yields None.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, Session, convert, disable_ttt
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> session = Session(model)
        >>> with disable_ttt(model):
        ...     session.read(torch.arange(40)[None])
        >>> session.chunks_written
        0
    """
    with switching(hooks_of(model), enabled=False):
        yield


@contextmanager
def share_sequence(model: nn.Module, group: ProcessGroup) -> Iterator[None]:
    """Splits rows over ranks inside the `with` block (paper §3.4, Algorithm 1).

    Each rank reads a contiguous part of each row, of equal length, and passes its part of `position_ids`.
    This call handles the fast weights alone. Attention needs its own exchange between ranks, such as Ulysses.
    Training under DeepSpeed's Ulysses does not need this call, since its group is found automatically.

    Args:
        model: a converted model.
        group: the process group of the ranks, in the order of their parts.

    Returns:
        A context manager, which yields None.

    Raises:
        InPlaceTTTError: in a forward inside the block, if a border between ranks cuts a chunk in two, or if
            rows have a cache or a padding mask.

    Examples:
        >>> import torch
        >>> from torch import distributed
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from inplace_ttt import InPlaceTTTConfig, convert
        >>> from inplace_ttt.surgery import share_sequence
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        >>> model = convert(AutoModelForCausalLM.from_config(small), InPlaceTTTConfig(chunk_size=16))
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> part = torch.arange(64)[None]  # with one rank, the whole row
        >>> with share_sequence(model, distributed.group.WORLD):
        ...     logits = model(part, position_ids=part, use_cache=False).logits
        >>> logits.shape
        torch.Size([1, 64, 32000])
        >>> distributed.destroy_process_group()
    """
    with sharing(hooks_of(model), group):
        yield


def _warn_if_nothing_reads(config: InPlaceTTTConfig, text: Any) -> None:
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and config.chunk_size >= context:
        _warn_once(
            f"a chunk of {config.chunk_size} tokens is at least as long as the model's context of "
            f"{context}, so no write would ever be read; lower the chunk size"
        )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)

"""The choices of a config's settings, and the checks of their values."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from .config_tables import MOST_TOKENS, KeyWhitening, UpdateClip, is_number, require, require_size

Target = Literal["embeddings", "hidden_states", "gradient"]
Conv = Literal["lookahead", "causal", "next"]
UpdateRule = Literal["sum", "ridge"]
ProjInit = Literal["random_diagonal", "shared_diagonal", "identity", "calibrated"]

_EVERY = re.compile(r"(every|upper):([1-9]\d{0,8})")
_MOST_TAPS = 4095
_MOST_STEPS = 1000


def check(config: Any, defaults: Any) -> None:
    """Checks the settings of a config, except for the options of its update rule.

    Args:
        config: an `InPlaceTTTConfig`.
        defaults: an object with the default of each field.

    Raises:
        InPlaceTTTError: if a value has a wrong type or is out of range, or if settings contradict each other.
    """
    _check_layers(config.layers)
    require(
        type(config.chunk_size) is int and config.chunk_size >= 1,
        f"chunk_size must be an integer of at least 1, got {config.chunk_size!r}.",
    )
    etas = config.eta if isinstance(config.eta, tuple) else (config.eta,)
    require(
        len(etas) > 0 and all(is_number(e) and e >= 0 for e in etas),
        f"eta must be a number of at least 0 (or one per layer), got {config.eta!r}.",
    )
    require_size("eta", *etas)
    require(
        config.chunk_size <= MOST_TOKENS,
        f"chunk_size must be at most {MOST_TOKENS}, got {config.chunk_size!r}.",
    )
    if isinstance(config.eta, tuple) and isinstance(config.layers, tuple):
        require(
            len(config.eta) == len(config.layers),
            f"eta has {len(config.eta)} values for {len(config.layers)} layers; give one number or one per "
            "layer.",
        )
    require(
        config.target in get_args(Target), f"target must be one of {get_args(Target)}, got {config.target!r}."
    )
    require(config.conv in get_args(Conv), f"conv must be one of {get_args(Conv)}, got {config.conv!r}.")
    require(
        type(config.kernel_size) is int and config.kernel_size >= 1,
        f"kernel_size must be an integer of at least 1, got {config.kernel_size!r}.",
    )
    require(
        config.kernel_size <= _MOST_TAPS,
        f"kernel_size must be at most {_MOST_TAPS}, got {config.kernel_size!r}.",
    )
    require(
        config.conv != "lookahead" or config.kernel_size % 2 == 1,
        f"kernel_size {config.kernel_size} is even, but a lookahead convolution is symmetric; use an odd "
        "size or conv='causal'.",
    )
    require(
        config.clip is None or isinstance(config.clip, UpdateClip),
        f"clip must be a UpdateClip or nothing, got {config.clip!r}.",
    )
    require(
        config.whitening is None or isinstance(config.whitening, KeyWhitening),
        f"whitening must be a KeyWhitening or nothing, got {config.whitening!r}.",
    )
    for name in ("detach_target", "update_on_decode", "normalize_targets"):
        require(
            isinstance(getattr(config, name), bool),
            f"{name} must be true or false, got {getattr(config, name)!r}.",
        )
    require(
        type(config.steps_per_chunk) is int and 1 <= config.steps_per_chunk <= _MOST_STEPS,
        f"steps_per_chunk must be an integer from 1 to {_MOST_STEPS}, got {config.steps_per_chunk!r}.",
    )
    require(
        config.target == "gradient" or config.steps_per_chunk == 1,
        "steps_per_chunk does nothing without target='gradient'; leave it out.",
    )
    require(
        config.target != "gradient" or config.chunk_size > 1,
        "a chunk of one token lacks a loss of its own; use a chunk_size above 1.",
    )
    for name in (
        "conv",
        "kernel_size",
        "detach_target",
        "normalize_targets",
        "proj_init",
        "prompt_write",
        "update_on_decode",
    ):
        require(
            config.target != "gradient" or getattr(config, name) == getattr(defaults, name),
            f"{name} does nothing with target='gradient', which uses neither a convolution nor P, and "
            "writes every token; leave it out.",
        )
    usual = defaults.kernel_size
    require(
        config.conv != "next" or config.kernel_size == usual,
        f"kernel_size {config.kernel_size} is of a convolution, and conv='next' has none; leave it out.",
    )
    require(
        config.proj_init in get_args(ProjInit),
        f"proj_init must be one of {get_args(ProjInit)}, got {config.proj_init!r}.",
    )
    require(
        config.proj_init != "calibrated"
        or config.conv == "next"
        or (config.conv == "lookahead" and config.kernel_size >= 3),
        "proj_init='calibrated' needs targets that see the next token; use conv='lookahead' and a "
        "kernel_size of 3 or more.",
    )


def _check_layers(layers: Any) -> None:
    if isinstance(layers, str):
        require(
            _EVERY.fullmatch(layers) is not None,
            f"layers must be 'every:N', 'upper:N' or a list of indices, got {layers!r}.",
        )
        return
    require(
        isinstance(layers, tuple) and len(layers) > 0 and all(type(i) is int and i >= 0 for i in layers),
        f"layers must be 'every:N', 'upper:N' or a non-empty list of indices from 0, got {layers!r}.",
    )
    require(len(set(layers)) == len(layers), f"layers names a layer twice: {list(layers)}.")
    require(list(layers) == sorted(layers), f"layers must be in order, got {list(layers)}.")

"""Makes the optimizer's parameter groups. Conv, P and a gate of writes have rates of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from ...errors import InPlaceTTTError
from ...surgery import fast_weights
from ..recipe.training_section import Training


def parameter_groups(model: nn.Module, settings: Training) -> list[dict[str, Any]]:
    """Returns AdamW's groups: conv, proj, gate, matrices, and vectors without decay.

    Args:
        model: a converted model.
        settings: the recipe's training section.

    Raises:
        InPlaceTTTError: if a layer's target generator is frozen, or a rate of conv or P would be ignored.
    """
    ttt, rest = split_off(model)
    refuse_without_effect(
        ttt,
        conv_learning_rate=settings.conv_learning_rate,
        proj_learning_rate=settings.proj_learning_rate,
        gate_learning_rate=settings.gate_learning_rate,
    )
    members = {
        **ttt,
        "matrices": [p for p in rest.values() if dimensions(p) > 1],
        "vectors": [p for p in rest.values() if dimensions(p) <= 1],
    }
    groups = []
    for name, params in members.items():
        if params:
            rate, decay = group_settings(settings, name)
            groups.append({"name": name, "params": params, "lr": rate, "weight_decay": decay})
    return groups


def split_off(model: nn.Module) -> tuple[dict[str, list[nn.Parameter]], dict[str, nn.Parameter]]:
    """Separates the target generators' trained parameters from the others.

    Args:
        model: a converted model.

    Returns:
        The groups `conv`, `proj` and `gate` (of writes), and the other trained parameters by name.

    Raises:
        InPlaceTTTError: if a layer's target generator is frozen.
    """
    ttt: dict[str, list[nn.Parameter]] = {"conv": [], "proj": [], "gate": []}
    for index, layer in fast_weights(model).items():
        for name, parameter in layer.ttt.named_parameters():
            if parameter.requires_grad:  # PEFT keeps two copies and trains one
                in_gate, last = "write_gate" in name.split("."), name.rpartition(".")[2]
                ttt["gate" if in_gate else "conv" if last == "conv" else "proj"].append(parameter)
        own = [*layer.ttt.parameters()]
        if own and not any(p.requires_grad for p in own):
            raise InPlaceTTTError(
                f"layer {index}'s conv and P are frozen, so nothing would learn to write; unfreeze "
                "its ttt module."
            )
    special = {id(p) for group in ttt.values() for p in group}
    return ttt, {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in special}


def refuse_without_effect(ttt: dict[str, list[nn.Parameter]], **settings: float | None) -> None:
    """Refuses a setting whose parameter group is empty in this model.

    Args:
        ttt: groups from `split_off`.
        settings: settings whose names begin with their group's; None if not given.

    Raises:
        InPlaceTTTError: if there is such a setting; the message has its name.
    """
    for name, value in settings.items():
        group = name.partition("_")[0]
        if value is not None and not ttt[group]:
            missing = {
                "conv": "a convolution that learns",
                "proj": "a P that learns",
                "gate": "a gate of writes that learns",
            }[group]
            raise InPlaceTTTError(f"{name} does nothing, since this model lacks {missing}; leave it out.")


def group_settings(settings: Training, group: str) -> tuple[float, float]:
    """Returns learning rate and weight decay of a group."""
    proj = settings.proj_learning_rate or settings.learning_rate
    return {
        "conv": (settings.conv_learning_rate or settings.learning_rate, settings.conv_weight_decay),
        "proj": (proj, settings.proj_weight_decay),
        "gate": (settings.gate_learning_rate or proj, settings.proj_weight_decay),
        "matrices": (settings.learning_rate, settings.weight_decay),
        "vectors": (settings.learning_rate, 0.0),
    }[group]


def dimensions(parameter: nn.Parameter) -> int:
    """Returns the number of dimensions of the whole parameter; ZeRO-3 itself keeps only a flat part."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def schedule(settings: Training, steps: int, group: str) -> Callable[[int], float]:
    """Returns a group's learning-rate factor as a function of the step.

    It warms up linearly, then decays to `min_lr_ratio` as the recipe sets.

    Args:
        settings: the recipe's training section.
        steps: steps of the run.
        group: name of the group; `conv`, `proj` and `gate` may have their own warm-up.
    """
    own = settings.ttt_warmup_steps if group in ("conv", "proj", "gate") else None
    warmup = settings.warmup_steps if own is None else own

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if settings.lr_scheduler == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        falling = 1 - done if settings.lr_scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * falling

    return factor

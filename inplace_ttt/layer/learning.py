"""A warning about a training run in which a fresh conversion never begins to write."""

from __future__ import annotations

import logging

import torch
from torch import nn

from .target import TargetGenerator
from .zero3 import is_partitioned

logger = logging.getLogger(__name__)


def warn_if_nothing_learns(model: nn.Module) -> None:
    """Warns if the model is trained, every target generator is frozen, and every convolution is zero.

    The writes are then zero, and no step changes that. LoRA on "all linear layers" has this effect, since
    PEFT freezes conv and P with the rest of the base.
    """
    generators = [module for module in model.modules() if isinstance(module, TargetGenerator)]
    own = [parameter for generator in generators for parameter in generator.parameters()]
    if not own or any(parameter.requires_grad or is_partitioned(parameter) for parameter in own):
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    with torch.no_grad():
        if any(generator.conv is None or bool(generator.conv.any()) for generator in generators):
            return
    logger.warning(
        "training starts with conv and P frozen in every TTT layer and conv zero, so this model will never "
        "write into its fast weights; "
        'set requires_grad for conv and P, or with PEFT modules_to_save=["ttt"] and target_modules without '
        "the down-projections."
    )

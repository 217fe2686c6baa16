"""A warning for a training in which a fresh conversion could never begin to write."""

from __future__ import annotations

import logging

import torch
from torch import nn

from .target import TargetGenerator
from .zero3 import is_partitioned

logger = logging.getLogger(__name__)


def warn_if_nothing_learns(model: nn.Module) -> None:
    """Warn where some parameter is trained, no target generator is, and every convolution is zero: writes are
    zero and stay so.

    LoRA with "all linear layers" does that: PEFT freezes conv and P along with the rest of the base.
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

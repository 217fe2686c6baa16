"""Which weights hold their numbers in the open, and which in a form that is their quantiser's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def parameter_dtype(weight: torch.dtype) -> torch.dtype:
    """The dtype of new parameters beside a weight: its own, or bfloat16 where that is a storage format
    (float8, integers)."""
    return weight if weight.is_floating_point and weight.itemsize >= 2 else torch.bfloat16


def is_encoded(weight: Tensor) -> bool:
    """Whether a weight of floating dtype is none inside, as torchao's and quanto's are: few operations know
    it."""
    return is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)


def readable_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the parameters that are not quantised; the packing of the others may change while
    the model runs."""
    return ((name, p) for name, p in module.named_parameters() if p.is_floating_point() and not is_encoded(p))

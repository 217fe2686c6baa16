"""Distinguishes plain weights from weights in the format of a quantization library."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def parameter_dtype(weight: torch.dtype) -> torch.dtype:
    """Returns the dtype of the new parameters of a layer with this weight.

    Args:
        weight: the weight's dtype.

    Returns:
        The same dtype, or bfloat16 for a storage format (float8, integers).
    """
    return weight if weight.is_floating_point and weight.itemsize >= 2 else torch.bfloat16


def is_encoded(weight: Tensor) -> bool:
    """Returns True for a weight with a floating dtype that is stored in another format.

    The tensor subclasses of torchao and quanto are such weights. They support few operations.
    """
    return is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)


def readable_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Returns the names and values of the parameters that are not quantized.

    Quantized parameters are left out, since their packing may change while the model runs.
    """
    return ((name, p) for name, p in module.named_parameters() if p.is_floating_point() and not is_encoded(p))


def packs_for_inference(model: nn.Module) -> bool:
    """Returns True if bitsandbytes packs 4-bit weights of the model anew for this CPU.

    It does so at the first forward without gradients. No gradient passes through a packed weight.
    """
    return any(
        getattr(module, "support_avx512bf16_for_cpu", False) and module.weight.device.type == "cpu"
        for module in model.modules()
    )

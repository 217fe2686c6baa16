"""Access to parameters under DeepSpeed's ZeRO stage 3, which are empty until they are gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def is_partitioned(parameter: Tensor) -> bool:
    """Returns True if ZeRO stage 3 has partitioned the parameter."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gathers partitioned parameters on every rank inside the context, and keeps the changes of rank 0.

    Other parameters are left unchanged.
    """
    partitioned = [p for p in parameters if is_partitioned(p)]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0):
        yield


def whole(parameter: Tensor) -> Tensor:
    """Returns the parameter, or a gathered copy if it is partitioned."""
    if not is_partitioned(parameter):
        return parameter
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()

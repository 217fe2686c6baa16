"""Parameters under DeepSpeed's ZeRO stage 3, which are empty until they are gathered from the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it partitioned parameters are whole, on every rank; what rank 0 writes to them stays. Others are
    untouched."""
    partitioned = [p for p in parameters if is_partitioned(p)]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0):
        yield


def whole(parameter: Tensor) -> Tensor:
    """The parameter, or a copy of it where it is partitioned."""
    if not is_partitioned(parameter):
        return parameter
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()

"""Finds DeepSpeed's Ulysses group, whose ranks share a sequence, and gathers rows from a group."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InPlaceTTTError

_ULYSSES = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"


@torch.compiler.assume_constant_result  # otherwise every import of a module causes a recompilation
def ulysses_group() -> ProcessGroup | None:
    """Returns DeepSpeed's sequence-parallel group, or None if there is none with several ranks.

    A compiled model keeps the group that existed when its graph was compiled.

    Raises:
        InPlaceTTTError: if torch's context parallelism is active.
    """
    if torch.nn.functional.scaled_dot_product_attention in getattr(
        sys.modules.get(_TORCH), "_replaced_functions", ()
    ):
        raise InPlaceTTTError(
            "torch's context parallelism gives a rank pieces from both ends of a sequence, but the fast "
            "weight needs one contiguous part; use DeepSpeed's sequence parallelism (sp_backend='deepspeed')."
        )
    group = getattr(sys.modules.get(_ULYSSES), "_SEQUENCE_PARALLEL_GROUP", None)
    return group if group is not None and dist.get_world_size(group) > 1 else None


def gather_rows(positions: Tensor, group: ProcessGroup) -> Tensor:
    """Gathers whole rows from the ranks of a group.

    Args:
        positions: this rank's part [B, T/P].
        group: the P ranks.

    Returns:
        The rows [B, T], on every rank.
    """
    parts = [torch.empty_like(positions) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, positions.contiguous(), group=group)
    return torch.cat(parts, dim=1)

"""Which ranks share a sequence: DeepSpeed's Ulysses group, found; or one that the caller names."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import InPlaceTTTError

_ULYSSES = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"


@torch.compiler.assume_constant_result  # else a graph is made anew after every import of whatever module
def ulysses_group() -> ProcessGroup | None:
    """DeepSpeed's sequence-parallel group of more than one rank, or None. Refuses torch's context
    parallelism.

    A compiled model keeps the one that there was when its graph was made.
    """
    if torch.nn.functional.scaled_dot_product_attention in getattr(
        sys.modules.get(_TORCH), "_replaced_functions", ()
    ):
        raise InPlaceTTTError(
            "torch's context parallelism gives a rank pieces from both ends of a sequence, which the fast "
            "weight cannot follow; "
            "use DeepSpeed's sequence parallelism (sp_backend='deepspeed')."
        )
    group = getattr(sys.modules.get(_ULYSSES), "_SEQUENCE_PARALLEL_GROUP", None)
    return group if group is not None and dist.get_world_size(group) > 1 else None


def gather_rows(positions: Tensor, group: ProcessGroup) -> Tensor:
    """Whole rows [B, T] from each rank's part [B, T/P]."""
    parts = [torch.empty_like(positions) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, positions.contiguous(), group=group)
    return torch.cat(parts, dim=1)

"""Reads of single keys from different matrices, one token per sequence.

The kernel loads each matrix in place. Without the kernel, a batched product first copies the matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import triton


def add_indexed_reads(
    out: Tensor,
    z: Tensor,
    maps: Tensor,
    places: Tensor,
    rows: Tensor,
    *,
    factors: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Adds scale · M[row] z[place] to out[place], in place, for each pair of a place and a row.

    Args:
        out: Outputs [N, d].
        z: Keys [N, r].
        maps: Matrices [B, d, r] of any floating dtype. Keys are converted to it.
        places: The tokens [n] int64, without repetitions.
        rows: The matrix of each token [n] int64.
        factors: Further factors of the matrices [B, 1, 1], or None.
        scale: Factor of all reads.

    Example:
        >>> maps, z, out = torch.eye(3).expand(2, 3, 3).contiguous(), torch.ones(4, 3), torch.zeros(4, 3)
        >>> add_indexed_reads(out, z, maps, torch.tensor([0, 3]), torch.tensor([1, 0]), scale=0.5)
        >>> out[:, 0].tolist()
        [0.5, 0.0, 0.0, 0.5]
    """
    if triton.reads_by_index(z.device, maps.dtype):
        triton.add_indexed_reads(out, z, maps, places, rows, factors, scale)
        return
    keys = z[places].to(maps.dtype)
    if z.device.type == "cpu":  # one product per key is faster there
        read = torch.stack([torch.mv(maps[row], key) for row, key in zip(rows.numpy(), keys, strict=True)])
    else:
        read = torch.bmm(maps[rows], keys[:, :, None])[..., 0]
    if factors is not None:
        read = read * factors[rows, 0]
    out.index_add_(0, places, (read * scale).to(out.dtype))

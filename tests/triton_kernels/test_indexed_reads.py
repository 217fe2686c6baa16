"""Reads of single keys from matrices by index: by the kernel and without it; without a GPU, through Triton's
interpreter."""

import pytest
import torch
from models import distance

from inplace_ttt.kernels import add_indexed_reads as by_kernel
from inplace_ttt.ops import add_indexed_reads
from inplace_ttt.ops.precision import in_range

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("shape", [(5, 7, 3), (4, 40, 100), (3, 16, 32)], ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("way", ["kernel", "plain"])
def test_reads_are_those_of_each_matrix(way: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Also for tokens of a larger tensor, in any order, and for matrices with factors."""
    rows, d, r = shape
    generator = torch.Generator().manual_seed(0)
    matrices = 3000 * torch.randn(rows, d, r, generator=generator).to(DEVICE)
    maps, factors = in_range(matrices, dtype)
    z = torch.randn(9, 2 * r, generator=generator).to(DEVICE, dtype)[:, :r]
    out = torch.randn(9, d, generator=generator).to(DEVICE, dtype)
    places = torch.tensor([8, 0, 3], device=DEVICE)
    where = torch.tensor([rows - 1, 0, rows - 1], device=DEVICE)
    expected = out.double()
    for place, row in zip(places.tolist(), where.tolist(), strict=True):
        expected[place] += 0.001 * matrices[row].double() @ z[place].double()
    scale = 0.001
    if way == "kernel":
        by_kernel(out, z, maps, places, where, factors, scale)
    else:
        add_indexed_reads(out, z, maps, places, where, factors=factors, scale=scale)
    assert distance(out, expected) < BOUNDS[dtype]
    assert (dtype == torch.float16) == (factors is not None)

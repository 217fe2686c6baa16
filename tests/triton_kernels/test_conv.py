"""The convolution kernel is the plain torch one, with both gradients; without a GPU, through Triton's
interpreter."""

import pytest
import torch
from models import distance
from torch import Tensor

from inplace_ttt.kernels import chunk_conv
from inplace_ttt.kernels.conv import taps_gradient
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops.conv import chunk_conv as conv_by_taps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = {
    "packed": ChunkLayout((((0, 7), (7, 29), (29, 30)),), 30, 6),
    "rows with padding": ChunkLayout((((3, 20),), (), ((0, 11), (13, 23))), 24, 9),
}
KERNELS = {"lookahead 5": (-2, 5), "causal 4": (-3, 4), "one tap": (0, 1)}


def both_ways(
    convolve, layout: ChunkLayout, dtype: torch.dtype, first_tap: int, taps: int, d: int = 19
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, conv, d_out = (
        torch.randn(*shape, generator=g)
        for shape in ((layout.batch, layout.length, d), (d, 1, taps), (3, 30, d))
    )
    x, conv = (t.to(DEVICE, dtype).requires_grad_() for t in (x, conv))
    out = convolve(x, conv, layout.chunk_ids(DEVICE), first_tap)
    dx, d_conv = torch.autograd.grad(out, (x, conv), d_out[: layout.batch, : layout.length].to(out))
    return {"out": out.detach(), "dx": dx, "d_conv": d_conv}


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)], ids=str
)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sample(4)
def test_it_is_the_plain_one(name: str, kernel: str, dtype: torch.dtype, bound: float) -> None:
    expected = both_ways(conv_by_taps, LAYOUTS[name], torch.float64, *KERNELS[kernel])
    found = both_ways(chunk_conv, LAYOUTS[name], dtype, *KERNELS[kernel])
    for key, value in found.items():
        assert value.dtype == dtype
        assert distance(value, expected[key]) < bound, key


def test_padding_may_hold_anything_and_gives_zero() -> None:
    layout = LAYOUTS["rows with padding"]
    x = torch.full((3, 24, 5), float("nan"), device=DEVICE)
    inside = layout.chunk_ids(DEVICE) >= 0
    x[inside] = torch.randn(int(inside.sum()), 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x.requires_grad_()
    conv = torch.ones(5, 1, 3, device=DEVICE, requires_grad=True)
    out = chunk_conv(x, conv, layout.chunk_ids(DEVICE), -1)
    assert out.isfinite().all() and (out[~inside] == 0).all()
    dx, d_conv = torch.autograd.grad(out.sum(), (x, conv))
    assert d_conv.isfinite().all() and (dx[~inside] == 0).all()


def test_the_gradient_of_conv_adds_up_in_float32() -> None:
    """256 and 3,999 times 1: in bfloat16 the first sums are rounded to even numbers already."""
    layout = ChunkLayout.from_lengths([[4000]], 4000)
    ones = torch.ones(1, 4000, 1, dtype=torch.bfloat16, device=DEVICE)
    x = ones.clone()
    x[0, 0] = 256
    assert taps_gradient(ones, x, layout.chunk_ids(DEVICE), 0, 1).item() == 256 + 3999

"""The article's two-layer dual form is its primal form."""

import pytest
import torch
from models import distance
from torch import Tensor

from inplace_ttt.memories import two_layer_dual, two_layer_primal

D, HIDDEN = 6, 11


def given(b: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = [(b, D)] * 3 + [(HIDDEN, D), (D, HIDDEN)]
    return [
        (torch.randn(shape, generator=g, dtype=torch.float64) * 0.5).to(dtype).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("b", [1, 2, 7, 16])
def test_dual_is_primal(b: int, dtype: torch.dtype, tolerance: float) -> None:
    results = []
    for form in (two_layer_primal, two_layer_dual):
        tensors = given(b, dtype)
        out = form(*tensors)
        g = torch.Generator().manual_seed(2)
        loss = sum((x * torch.randn(x.shape, generator=g).to(dtype)).sum() for x in out)
        results.append([x.detach() for x in out] + list(torch.autograd.grad(loss, tensors)))
    for name, found, expected in zip(
        ("y", "w1", "w2", "dq", "dk", "dv", "dw1", "dw2"), *results, strict=True
    ):
        assert distance(found, expected) < tolerance and expected.abs().max() > 1e-3, name


def test_both_layers_read_their_own_token() -> None:
    """Token t reads weights that hold the steps of tokens 0 to t, in both layers."""
    q, k, v, w1, w2 = (x.detach() for x in given(5, torch.float64))
    y = two_layer_dual(q, k, v, w1, w2)[0]
    for t in range(5):
        _, first, second = two_layer_dual(q[: t + 1], k[: t + 1], v[: t + 1], w1, w2)
        assert distance(second @ (first @ q[t]).relu() + q[t], y[t]) < 1e-12

"""What least squares takes of the kernels: inverse factors, and float32 in two halves; without a GPU, through
Triton's interpreter."""

import pytest
import torch
from models import distance
from test_fast_weight import DEVICE
from torch import Tensor

from inplace_ttt.kernels import halves, inverse_factor
from inplace_ttt.ops.products import Operand, product


def definite(n: int, r: int, seed: int = 0) -> Tensor:
    x = torch.randn(n, r, 2 * r, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x @ x.mT / r + 0.1 * torch.eye(r, dtype=torch.float64)).to(DEVICE)


@pytest.mark.parametrize("r", [1, 7, 8, 9, 16, 17, 37])
def test_the_inverse_factor(r: int) -> None:
    matrices = definite(3, r)
    found = inverse_factor(matrices.float())
    assert found.dtype == torch.float32 and (found.triu(1) == 0).all()
    assert distance(found, torch.linalg.inv(torch.linalg.cholesky(matrices))) < 1e-5


def test_the_inverse_factor_reads_the_lower_triangle() -> None:
    matrices = definite(2, 21).float()
    expected = inverse_factor(matrices.clone())
    assert torch.equal(inverse_factor(matrices.tril()), expected)


@pytest.mark.parametrize("where", [0, 5, 20])
def test_what_is_not_positive_definite_gives_no_number(where: int) -> None:
    matrices = definite(2, 21).float()
    matrices[1, where, where] = -1.0
    found = inverse_factor(matrices)
    assert found[0].isfinite().all() and found[1].isnan().any(dim=-1)[where:].all()


def test_halves_add_up() -> None:
    x = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x[0, 0, :4] = torch.tensor([0.0, 1e30, -1e-30, float("inf")])
    for part in (x, x[:, 1:4], x.mT, x[:1].expand(3, -1, -1)):
        high, low = halves(part)
        assert high.dtype == low.dtype == torch.bfloat16 and torch.equal(high, part.bfloat16())
        rest = part - high.float() - low.float()
        assert (rest.abs() <= part.abs() * 2**-16)[part.isfinite()].all()


@pytest.mark.parametrize("split", [(True, False), (False, True), (True, True)])
def test_products_of_halves_keep_16_bits(split: tuple[bool, bool]) -> None:
    g = torch.Generator().manual_seed(2)
    given = [torch.randn(3, 20, 30, generator=g).to(DEVICE), torch.randn(3, 30, 10, generator=g).to(DEVICE)]
    given = [x if halved else x.bfloat16() for x, halved in zip(given, split, strict=True)]
    a, b = (Operand(halves(x)) if halved else Operand((x,)) for x, halved in zip(given, split, strict=True))
    expected = 0.5 * given[0].double() @ given[1].double()
    assert distance(product(a, b, alpha=0.5), expected) < 3e-5
    assert distance(product(b.mT, a.mT, alpha=0.5), expected.mT) < 3e-5
    out = torch.full((3, 24, 10), float("nan"), device=DEVICE)
    product(a, b, alpha=0.5, out=out[:, 2:22])
    assert distance(out[:, 2:22], expected) < 3e-5 and out[:, :2].isnan().all() and out[:, 22:].isnan().all()
    assert torch.equal(a.rows(3, None).parts[-1], a.parts[-1][:, 3:])

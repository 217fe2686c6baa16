"""The largest directions of activations: exact where Σ is small, nearly the best from a sketch, and refused
where they cannot be known."""

import pytest
import torch
from torch import Tensor

from inplace_ttt import InPlaceTTTError
from inplace_ttt.calibration.directions import Directions, LeadingDirections

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, RANK = 256, 24
"""Wide enough for a sketch."""


def activations(tokens: int, values: Tensor, seed: int = 0) -> Tensor:
    """[tokens, h] around a mean, whose covariance has these eigenvalues [h], along no axis."""
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(
        torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(99))
    )
    return torch.randn(tokens, len(values), generator=generator) * values.sqrt() @ turn + 3 * turn[:, 0]


def slow(width: int) -> Tensor:
    """A spectrum that falls as those of real activations do."""
    return 1 / (torch.arange(width) + 10.0)


def directions(rows: list[Tensor], rank: int, device: str = "cpu") -> Directions:
    reader = LeadingDirections(rows[0].shape[-1], rank, device)
    for row in rows:
        reader.add(row.to(device))
    return reader.found()


def largest(rows: list[Tensor], rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The second moment [h, h] of z - ‖z‖c, its largest eigenvalues [r] and vectors [h, r], in float64."""
    z = torch.cat([row.double().flatten(0, -2) for row in rows])
    left = z - z.norm(dim=1, keepdim=True) * center(rows)
    sigma = left.T @ left / len(left)
    values, vectors = torch.linalg.eigh(sigma)
    return sigma, values.flip(0)[:rank], vectors.flip(1)[:, :rank]


def center(rows: list[Tensor]) -> Tensor:
    """c [h], by which Σ ‖z - ‖z‖c‖² is least."""
    z = torch.cat([row.double().flatten(0, -2) for row in rows])
    return torch.linalg.lstsq(z.norm(dim=1, keepdim=True), z).solution[0]


def captured(found: Directions, sigma: Tensor, values: Tensor) -> float:
    """Of the variance along the best directions, the share along those found, which are orthonormal and in
    order."""
    vectors = found.vectors.double()
    assert found.vectors.dtype == found.values.dtype == torch.float32
    assert (vectors.T @ vectors - torch.eye(vectors.shape[1])).abs().max() < 1e-5
    assert (found.values.diff() <= 0).all()
    assert found.trace == pytest.approx(float(sigma.trace()), rel=1e-5)
    return float((vectors * (sigma @ vectors)).sum() / values.sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [10, 40])
def test_a_narrow_layer_is_exact(dtype: torch.dtype, rank: int) -> None:
    z = activations(1501, slow(40)).to(dtype)
    rows = [z[None, :1100], z[1100:1101], z[1101:].view(2, 200, 40)]
    found = directions(rows, rank)
    sigma, values, vectors = largest(rows, rank)
    assert captured(found, sigma, values) == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(found.center.double(), center(rows), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        found.values.double(), values, rtol=1e-4, atol=1e-6 * float(z.double().square().sum() / len(z))
    )
    alike = (found.vectors.double() * vectors).sum(0).abs()
    assert alike.min() > 1 - 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_layer_is_nearly_so(dtype: torch.dtype) -> None:
    rows = [z.to(dtype) for z in activations(12_000, slow(WIDTH)).split(1234)]
    found = directions(rows, RANK)
    sigma, values, _ = largest(rows, RANK)
    assert captured(found, sigma, values) > 0.985
    ratios = found.values.double() / values
    assert ratios.max() < 1.001 and ratios.mean() > 0.85


def test_one_long_row_is_as_good_as_many() -> None:
    z = activations(12_000, slow(WIDTH))
    sigma, values, _ = largest([z], RANK)
    assert captured(directions([z[None]], RANK), sigma, values) > 0.985


def test_few_tokens_are_known_exactly() -> None:
    """More than the rank, but fewer than the sketch has columns: all that was seen fits into it."""
    rows = [activations(RANK + 5, slow(WIDTH))]
    found = directions(rows, RANK)
    sigma, values, _ = largest(rows, RANK)
    assert captured(found, sigma, values) > 0.9999
    torch.testing.assert_close(found.values.double(), values, rtol=1e-3, atol=0)


def test_what_a_text_can_do_to_a_sketch() -> None:
    """It starts with zeros, then says one sentence again and again; one direction is 10,000 times as large as
    the others."""
    sentence = activations(10, slow(WIDTH), seed=1).repeat(300, 1)
    values = slow(WIDTH)
    values[0] *= 1e4
    for rows in (
        [torch.zeros(3000, WIDTH), activations(12_000, slow(WIDTH))],
        [sentence, activations(12_000, slow(WIDTH))],
        [activations(12_000, values)],
    ):
        sigma, best, vectors = largest(rows, RANK)
        assert captured(directions(rows, RANK), sigma, best) > 0.975
    others = torch.eye(WIDTH, dtype=torch.float64) - vectors[:, :1] @ vectors[:, :1].T
    found = directions(rows, RANK).vectors.double()
    assert float((others @ found).mul(sigma @ others @ found).sum() / best[1:].sum()) > 0.98, (
        "besides the largest"
    )
    found = directions([sentence], RANK)
    assert (
        captured(found, *largest([sentence], RANK)[:2]) > 0.9999
        and found.values[10:].max() < 1e-4 * found.values[0]
    )


def test_it_is_the_same_every_time_and_everywhere() -> None:
    rows = list(activations(6000, slow(WIDTH)).split(1000))
    found = directions(rows, RANK)
    again = directions(rows, RANK)
    assert torch.equal(found.values, again.values) and torch.equal(found.vectors, again.vectors)
    elsewhere = directions(rows, RANK, DEVICE)
    assert elsewhere.vectors.device.type == DEVICE
    torch.testing.assert_close(elsewhere.values.cpu(), found.values, rtol=1e-3, atol=0)


@pytest.mark.parametrize("width", [40, WIDTH])
def test_what_cannot_be_known_is_refused(width: int) -> None:
    with pytest.raises(InPlaceTTTError, match="20 tokens cannot determine the 24 largest"):
        directions([activations(20, slow(width))], RANK)
    with pytest.raises(InPlaceTTTError, match="did not vary"):
        directions([torch.full((2, 3000, width), 2.0)], RANK)
    for value in (float("nan"), float("inf"), -float("inf")):
        z = activations(30, slow(width))
        z[7, 3] = value
        with pytest.raises(InPlaceTTTError, match="not finite"):
            directions([z], RANK)
    for rank in (0, width + 1):
        with pytest.raises(InPlaceTTTError, match=f"rank of 1 to {width}"):
            LeadingDirections(width, rank)

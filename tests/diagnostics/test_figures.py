"""The figures of a diagnosis alone: directions of keys, rounding, changes and their errors."""

import pytest
import torch

from inplace_ttt.diagnostics.keys import key_health
from inplace_ttt.diagnostics.precision import running_sums
from inplace_ttt.diagnostics.write_effects import Change, Reading, Scored


@pytest.mark.parametrize(("dims", "effective"), [(1, 1.0), (4, 4.0)])
def test_keys_in_few_directions(dims: int, effective: float) -> None:
    z = torch.eye(16)[torch.arange(64) % dims]
    health = key_health(z)
    assert health.effective == pytest.approx(effective)
    same = (64 / dims - 1) / 63  # of all pairs
    assert health.cosine == pytest.approx(same, abs=1e-5) and health.collision == pytest.approx(
        same**0.5, abs=1e-5
    )


def test_random_keys_span_what_they_can() -> None:
    health = key_health(torch.randn(512, 64, generator=torch.Generator().manual_seed(0)))
    assert 50 < health.effective < 64 and health.collision == pytest.approx(1 / 8, rel=0.05)


def test_a_running_weight_in_bf16_loses_what_the_evidence_says() -> None:
    """Chunks that each move W by 0.1 % and 0.03 % of its norm: most of the update is lost; float32 would lose
    1e-7."""
    generator = torch.Generator().manual_seed(0)
    w0, lost = torch.randn(256, 512, generator=generator) * 0.02, []
    for move in (1e-3, 3e-4):
        state, sums = torch.zeros(256, 512), running_sums(torch.zeros(256, 512), w0, 1.0, torch.bfloat16)
        for _ in range(32):
            delta = torch.randn(256, 512, generator=generator) * 0.02 * move
            state += delta
            sums.add(delta)
        lost.append(sums.lost(state, None))
    assert lost[0].weight is not None and lost[1].weight is not None and lost[0].state is not None
    assert 0.6 < lost[0].weight < lost[1].weight and lost[0].state < 0.02


def test_a_change_counts_when_it_is_above_its_error() -> None:
    assert (
        Change(0.1, 0.01).exceeds(0.05)
        and not Change(0.1, 0.06).exceeds(0.05)
        and not Change(0.4, None).exceeds(0.05)
    )


def test_a_change_has_the_error_of_its_tokens() -> None:
    """Two chunks of four tokens and one of a single token: this one weighs a ninth of the mean, and as much
    of its error."""
    chunk = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 2]])
    on = torch.tensor([[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 9.0]])
    every = torch.ones_like(chunk, dtype=torch.bool)
    change = Scored(every, chunk, ~every).change(Reading(on), Reading(torch.zeros_like(on)))
    mean = on.mean().item()
    parts = [4 * (1 - mean), 4 * (2 - mean), 9 - mean]
    assert change.loss == pytest.approx(mean) and change.stderr == pytest.approx(
        (3 / 2 * sum(p * p for p in parts)) ** 0.5 / 9
    )


def test_directions_are_counted_at_any_size() -> None:
    """Squares of squares of tiny or huge numbers are none that a float32 holds."""
    z = torch.eye(8)[torch.arange(64) % 4]
    assert [key_health(size * z).effective for size in (1e-14, 1.0, 1e12)] == pytest.approx([4.0, 4.0, 4.0])

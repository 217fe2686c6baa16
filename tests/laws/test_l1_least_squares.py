"""L1 for least squares: the walk over sums is the reference, and reads with the best map."""

import pytest
import torch
from models import distance
from op_runs import CASES, CHUNK_SIZES, CLIPS, DOCUMENTS, ETA, TOLERANCE, D, H, inputs, layout_of, run

from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import (
    fast_weight,
    least_squares_walk,
    normal_equations,
    products,
    stretches,
)
from inplace_ttt.rules import RidgeRule


def check_least_squares(
    layout: ChunkLayout, dtype: torch.dtype, case: tuple[str, bool, bool, bool], gated: bool
) -> None:
    clip, start, keep, w0 = case
    given = inputs(layout, dtype, start, w0, ridge=0.5, gated=gated)
    expected = run("reference", layout, given, CLIPS[clip], keep, rule=RidgeRule(0.5))
    found = run("auto", layout, given, CLIPS[clip], keep, rule=RidgeRule(0.5))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and value.shape == expected[name].shape
        where = f"{name} with clip {clip}, initial_state {start}, return_state {keep}, weight {w0}"
        known = expected[name]
        # a token that is clipped alone counts as much whatever its gate: a gradient of rounding
        if name == "d_gate":
            value, known = (
                torch.cat([x.flatten(), expected["d_v"].flatten().to(x.dtype)]) for x in (value, known)
            )
        assert distance(value, known) < 10 * TOLERANCE[dtype], where


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("together", "stretch"), [(1, 1), (3, 2), (1, 20)])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_least_squares_is_the_reference(
    gated: bool,
    together: int,
    stretch: int,
    documents: str,
    chunk_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many stretches go at once, of however many chunks, and with keys that are as wide as a CPU
    finds crowded."""
    monkeypatch.setattr(least_squares_walk, "chunks_together", lambda device, state_bytes: together)
    monkeypatch.setattr(least_squares_walk, "chunks_in_stretch", lambda *of: stretch)
    monkeypatch.setattr(least_squares_walk, "serve_gradients", lambda device: True)
    monkeypatch.setattr(normal_equations, "_CROWDED", H if together == 1 else 512)
    for case in CASES[together % 3 :: 3]:
        check_least_squares(layout_of(documents, chunk_size), dtype, case, gated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_least_squares_as_on_a_gpu(
    documents: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks at once, by inverse factors and with float32 in halves: the kernels' part through their
    interpreter."""
    monkeypatch.setattr(least_squares_walk, "chunks_together", lambda device, state_bytes: 3)
    monkeypatch.setattr(least_squares_walk, "chunks_in_stretch", lambda *of: 2)
    monkeypatch.setattr(least_squares_walk, "serve_gradients", lambda device: True)
    for module in (normal_equations, stretches):
        monkeypatch.setattr(module, "by_products", lambda gram: True)
    monkeypatch.setattr(
        products, "splits", lambda x, beside: x.dtype == torch.float32 and beside == torch.bfloat16
    )
    number = list(DOCUMENTS).index(documents)
    for gated in (False, True):
        case = CASES[(number * 5 + 3 * gated + (dtype == torch.float32)) % len(CASES)]
        check_least_squares(layout_of(documents, CHUNK_SIZES[number % len(CHUNK_SIZES)]), dtype, case, gated)


@pytest.mark.parametrize("tokens", [2, 40])
def test_least_squares_is_the_best_map(tokens: int) -> None:
    """After n tokens, what torch.linalg.lstsq finds of them, with √λ I and 0 as further rows; of few tokens,
    the values themselves."""
    layout = ChunkLayout.from_lengths([[tokens + 1]], 1)
    given = inputs(layout, torch.float64, start=False, w0=False)
    z, v = (given[name][0].detach() for name in ("z", "v"))
    for ridge in (1e-9, 0.3):
        out = fast_weight(
            given["z"], given["v"], None, eta=ETA, layout=layout, rule=RidgeRule(ridge)
        ).detach()[0, -1]
        rows = torch.cat([z[:-1], ridge**0.5 * torch.eye(H, dtype=z.dtype)])
        best = torch.linalg.lstsq(rows, torch.cat([v[:-1], torch.zeros(H, D, dtype=v.dtype)])).solution
        assert distance(out, ETA * (z[-1] @ best)) < 1e-6
    if tokens < H:
        state = fast_weight(
            given["z"], given["v"], None, eta=ETA, layout=layout, rule=RidgeRule(1e-9), return_state=True
        )[1][0].detach()
        assert distance(z[:-1] @ normal_equations.readout(state, RidgeRule(1e-9)).T, v[:-1]) < 1e-6


def test_a_gate_counts_tokens() -> None:
    """A token that counts twice is as one that stands there twice, and one that counts nothing as one that
    was never there."""
    layout = ChunkLayout.from_lengths([[10]], 9)
    given = inputs(layout, torch.float64, start=False, w0=False)
    gate = torch.tensor([[1.0, 2.0, 0.0, 1.0, 1.0, 2.0, 1.0, 0.0, 1.0, 1.0]])
    found = fast_weight(**given, weight=None, eta=ETA, layout=layout, rule=RidgeRule(0.3), gate=gate)[0, -1]
    as_often = {name: x[:, [0, 1, 1, 3, 4, 5, 5, 6, 8, 9]] for name, x in given.items()}
    assert (
        distance(
            found, fast_weight(**as_often, weight=None, eta=ETA, layout=layout, rule=RidgeRule(0.3))[0, -1]
        )
        < 1e-10
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d", "r"), [(64, 32), (64, 48), (32, 48)])
def test_a_gates_gradient_is_exact_in_half_precision(d: int, r: int, dtype: torch.dtype) -> None:
    """Of targets that the keys foretell it is a small difference of large sums."""
    layout, g = ChunkLayout.from_lengths([[512]], 64), torch.Generator().manual_seed(0)
    k, m, noise, out = (
        torch.randn(*shape, generator=g) for shape in ((1, 512, r), (r, d), (1, 512, d), (1, 512, d))
    )
    made, found = [(x / r**0.5).to(dtype) for x in (k, k @ m + 0.03 * noise, out)], []
    for wide in (torch.float32, dtype):
        gate = torch.linspace(0, 2, 512)[None].requires_grad_()
        z, v, cotangent = (x.to(wide) for x in made)
        read = fast_weight(z, v, None, eta=ETA, layout=layout, rule=RidgeRule(0.01), gate=gate)
        found += torch.autograd.grad(read, gate, cotangent)
    assert float((found[1] - found[0]).norm()) < torch.finfo(dtype).eps * float(found[0].norm())


def test_much_damping_is_the_papers_rule() -> None:
    layout = ChunkLayout.from_lengths([[9]], 3)
    given = inputs(layout, torch.float64, start=False, w0=False)
    found = fast_weight(**given, weight=None, eta=ETA * 1e8, layout=layout, rule=RidgeRule(1e8)).detach()
    assert distance(found, fast_weight(**given, weight=None, eta=ETA, layout=layout).detach()) < 1e-6


def test_one_sentence_without_end_hides_no_damping() -> None:
    """In float32, where a Gram matrix of large numbers rounds off a small λ: what is read back is what was
    written."""
    layout = ChunkLayout.from_lengths([[40_001]], 100)
    z, v = (torch.randn(1, 4, width, generator=torch.Generator().manual_seed(1)) for width in (H, D))
    z, v = (x.repeat(1, 10_001, 1)[:, :40_001] for x in (z, v))
    out = fast_weight(z, v, None, eta=1.0, layout=layout, rule=RidgeRule(1e-6))
    assert distance(out[0, 40_000], v[0, 40_000]) < 0.01


def test_a_sum_that_is_no_gram_is_not_a_number() -> None:
    """Where float32 finds no factor, what is read must not look like a number."""
    layout = ChunkLayout.from_lengths([[2]], 1)
    given = inputs(layout, torch.float32, start=True, w0=False, ridge=0.5)
    state = given["initial_state"].detach().clone()
    state[0, -H:] = -torch.eye(H)
    out = fast_weight(
        given["z"][:1],
        given["v"][:1],
        None,
        eta=ETA,
        layout=layout,
        rule=RidgeRule(0.5),
        initial_state=state[:1],
    )
    assert out.isnan().all()

"""L1: the chunked op is the reference, in outputs and in every gradient."""

import itertools
from typing import Any

import pytest
import torch
from models import distance
from torch import Tensor

from inplace_ttt import InPlaceTTTError
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import (
    fast_weight,
    least_squares_walk,
    normal_equations,
    products,
    state_dtype,
    stretches,
)
from inplace_ttt.rules import RidgeRule, SumRule

H, D, ETA = 6, 5, 0.3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}

# name -> documents of each row, and the row length with its padding
DOCUMENTS: dict[str, tuple[list[list[tuple[int, int]]], int]] = {
    "one": ([[(0, 23)]], 23),
    "packed": ([[(0, 5), (5, 14), (14, 21)]], 21),
    "whole chunks": ([[(0, 8), (8, 24)]], 24),
    "single tokens": ([[(0, 1), (1, 2), (2, 3), (3, 11)]], 11),
    "unequal rows": ([[(0, 23)], [(0, 4), (4, 5), (5, 17)], [], [(0, 1)]], 25),
    "padding all around": ([[(3, 20)], [(2, 9), (11, 20)]], 22),
    "only padding": ([[]], 4),
}
CHUNK_SIZES = (1, 3, 8, 50)
CLIPS = {"free": None, "loose": 1e6, "biting": 0.4, "tensor": torch.tensor(1.5)}
CASES = [
    (clip, start, keep, w0)
    for clip in CLIPS
    for start, keep, w0 in itertools.product((False, True), repeat=3)
]


def layout_of(name: str, chunk_size: int) -> ChunkLayout:
    rows, length = DOCUMENTS[name]
    return ChunkLayout(tuple(tuple(row) for row in rows), length, chunk_size)


def inputs(
    layout: ChunkLayout,
    dtype: torch.dtype,
    start: bool,
    w0: bool,
    ridge: float | None = None,
    gated: bool = False,
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    shape = (layout.batch, layout.length)
    made = {
        "z": torch.randn(*shape, H, generator=g, dtype=torch.float64),
        "v": torch.randn(*shape, D, generator=g, dtype=torch.float64),
    }
    if w0:
        made["weight"] = torch.randn(D, H, generator=g, dtype=torch.float64)
    made = {name: x.to(dtype) for name, x in made.items()}
    if start:
        state = torch.randn(layout.batch, D, H, generator=g, dtype=torch.float64)
        if ridge is not None:
            keys = torch.randn(layout.batch, 2 * H, H, generator=g, dtype=torch.float64)
            state = torch.cat([state, keys.mT @ keys], dim=1)
        made["initial_state"] = state.to(state_dtype(dtype))
    if gated:
        made["gate"] = (2 * torch.rand(*shape, generator=g, dtype=torch.float64)).to(state_dtype(dtype))
    return {name: x.requires_grad_() for name, x in made.items()}


def run(
    backend: str,
    layout: ChunkLayout,
    given: dict[str, Tensor],
    clip: float | Tensor | None,
    keep: bool,
    eta: float = ETA,
    **rule: Any,
) -> dict[str, Tensor]:
    """Everything the op gives: outputs, state, and the gradient of each input under a random cotangent."""
    settings = {"weight": None, **given, **rule}
    result = fast_weight(**settings, eta=eta, layout=layout, clip=clip, backend=backend, return_state=keep)
    results = dict(zip(("out", "state"), result, strict=True)) if keep else {"out": result}
    g = torch.Generator().manual_seed(4)
    loss = sum((x * torch.randn(x.shape, generator=g).to(x.dtype)).sum() for x in results.values())
    grads = (
        torch.autograd.grad(loss, list(given.values()), allow_unused=True)
        if loss.requires_grad
        else [None] * len(given)
    )
    for name, x, grad in zip(given, given.values(), grads, strict=True):
        results[f"d_{name}"] = torch.zeros_like(x) if grad is None else grad
    return {name: x.detach() for name, x in results.items()}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_chunked_is_the_reference(documents: str, chunk_size: int, dtype: torch.dtype) -> None:
    layout = layout_of(documents, chunk_size)
    for clip, start, keep, w0 in CASES if dtype == torch.float64 else CASES[1::3]:
        given = inputs(layout, dtype, start, w0)
        expected = run("reference", layout, given, CLIPS[clip], keep)
        found = run("chunked", layout, given, CLIPS[clip], keep)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value.dtype == expected[name].dtype and value.shape == expected[name].shape
            where = f"{name} with clip {clip}, initial_state {start}, return_state {keep}, weight {w0}"
            assert distance(value, expected[name]) < TOLERANCE[dtype], where


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


def test_the_table_bites() -> None:
    """The inputs above tell the options apart: writes change outputs, clipping changes them again, a state
    too."""
    layout = layout_of("unequal rows", 3)
    given = inputs(layout, torch.float64, start=True, w0=True)
    free = run("reference", layout, given, None, keep=True)
    plain = given["z"] @ given["weight"].T
    assert distance(free["out"], plain.detach()) > 0.1
    assert distance(run("reference", layout, given, CLIPS["loose"], keep=True)["out"], free["out"]) == 0
    for clip in ("biting", "tensor"):
        assert distance(run("reference", layout, given, CLIPS[clip], keep=True)["out"], free["out"]) > 0.1
    squares = inputs(layout, torch.float64, start=True, w0=True, ridge=0.5)
    fitted = run("reference", layout, squares, None, keep=True, rule=RidgeRule(0.5))["out"]
    assert distance(fitted, free["out"]) > 0.1
    assert (
        distance(run("reference", layout, squares, 0.4, keep=True, rule=RidgeRule(0.5))["out"], fitted) > 0.05
    )
    assert (
        distance(run("reference", layout, squares, None, keep=True, rule=RidgeRule(3.0))["out"], fitted)
        > 0.05
    )
    del given["initial_state"]
    assert distance(run("reference", layout, given, None, keep=True)["out"], free["out"]) > 0.1


@pytest.mark.parametrize(("clip", "w0", "keep"), itertools.product((None, 0.4), (True, False), (True, False)))
def test_gradcheck_of_the_op(clip: float | None, w0: bool, keep: bool) -> None:
    layout = ChunkLayout((((0, 5), (6, 9)), ((1, 8),)), 9, 3)
    given = inputs(layout, torch.float64, start=True, w0=w0)

    def op(z: Tensor, v: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        weight, state = rest if w0 else (None, *rest)
        return fast_weight(
            z,
            v,
            weight,
            eta=ETA,
            layout=layout,
            initial_state=state,
            clip=clip,
            backend="chunked",
            return_state=keep,
        )

    assert torch.autograd.gradcheck(op, tuple(given.values()))


@pytest.mark.parametrize(
    ("conv", "kernel_size"), [("lookahead", 1), ("lookahead", 5), ("causal", 4), ("causal", 5)]
)
def test_gradcheck_of_the_target(conv: str, kernel_size: int) -> None:
    layout = ChunkLayout((((0, 5), (6, 9)), ((1, 8),)), 9, 3)
    ttt, x = target(conv, kernel_size, torch.float64), inputs(layout, torch.float64, False, False)["v"]

    def generate(x: Tensor, conv_weight: Tensor, proj: Tensor) -> Tensor:
        return torch.func.functional_call(ttt, {"conv": conv_weight, "proj": proj}, (x, layout))

    assert torch.autograd.gradcheck(generate, (x, ttt.conv, ttt.proj))


def target(conv: str, kernel_size: int, dtype: torch.dtype) -> TargetGenerator:
    ttt = TargetGenerator(D, kernel_size, conv, dtype=dtype)
    g = torch.Generator().manual_seed(5)
    for parameter in ttt.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g))
    return ttt


def plain_target(ttt: TargetGenerator, x: Tensor, layout: ChunkLayout) -> Tensor:
    """V token by token, from the definition: tap j of token t reads t + first_tap + j, inside t's chunk
    only."""
    rows = []
    for row, documents in enumerate(layout.documents):
        mixed = [torch.zeros(D, dtype=x.dtype)] * layout.length
        for chunk in (c for document in documents for c in layout.chunks(document)):
            for t in range(*chunk):
                for j in range(ttt.conv.shape[-1]):
                    if chunk[0] <= t + ttt.first_tap + j < chunk[1]:
                        mixed[t] = mixed[t] + ttt.conv[:, 0, j] * x[row, t + ttt.first_tap + j]
        rows.append(torch.stack(mixed))
    return torch.stack(rows) @ ttt.proj


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("conv", "kernel_size"), [("lookahead", 5), ("causal", 5), ("causal", 2)])
@pytest.mark.parametrize("documents", ["packed", "unequal rows", "padding all around"])
def test_gradients_through_the_target(
    documents: str, conv: str, kernel_size: int, dtype: torch.dtype
) -> None:
    """Source, conv, P, keys and W0: the whole layer against the reference on targets made token by token."""
    layout = layout_of(documents, 4)
    ttt, given = target(conv, kernel_size, dtype), inputs(layout, dtype, start=False, w0=True)
    x, leaves = given.pop("v"), {**dict(ttt.named_parameters()), **given}
    leaves["x"] = x
    results = []
    for backend, v in (("reference", plain_target(ttt, x, layout)), ("chunked", ttt(x, layout))):
        out = fast_weight(given["z"], v, given["weight"], eta=ETA, layout=layout, clip=9.0, backend=backend)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        results.append([out.detach(), *torch.autograd.grad((out * cotangent).sum(), list(leaves.values()))])
    # bfloat16 rounds every product of the two ways differently, so the bound there is on the typical entry.
    for name, expected, found in zip(("out", *leaves), *results, strict=True):
        if dtype == torch.bfloat16:
            assert (found - expected).float().norm() < 2e-2 * expected.float().norm(), name
        else:
            assert distance(found, expected) < TOLERANCE[dtype], name


@pytest.mark.parametrize("ridge", [None, 0.5], ids=["sum", "least squares"])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_every_output_is_written(
    documents: str, ridge: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fresh memory full of NaN instead of whatever lies there, nothing changes."""
    layout = layout_of(documents, 3)
    rule = SumRule() if ridge is None else RidgeRule(ridge)
    cases = [(inputs(layout, torch.float64, start, w0, ridge), clip, keep) for clip, start, keep, w0 in CASES]
    expected = [run("chunked", layout, given, CLIPS[clip], keep, rule=rule) for given, clip, keep in cases]
    ttt, x = target("lookahead", 5, torch.float64), cases[0][0]["v"]
    expected_target = ttt(x, layout)

    def poisoned(make):
        return lambda *args, **kwargs: make(*args, **kwargs).fill_(float("nan"))

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(Tensor, name, poisoned(getattr(Tensor, name)))
    for (given, clip, keep), values in zip(cases, expected, strict=True):
        for name, value in run("chunked", layout, given, CLIPS[clip], keep, rule=rule).items():
            assert torch.equal(value, values[name]), name
    assert torch.equal(ttt(x, layout), expected_target)


@pytest.mark.parametrize("alone", ["z", "v", "weight", "initial_state"])
def test_each_input_may_be_the_only_one_to_learn(alone: str) -> None:
    layout = layout_of("unequal rows", 3)
    given = inputs(layout, torch.float64, start=True, w0=True)
    together = run("chunked", layout, given, 0.4, keep=False)[f"d_{alone}"]
    frozen = {name: x.detach().requires_grad_(name == alone) for name, x in given.items()}
    out = fast_weight(**frozen, eta=ETA, layout=layout, clip=0.4)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    (found,) = torch.autograd.grad((out * cotangent).sum(), [frozen[alone]])
    assert distance(found, together) < 1e-12


REFUSED = {
    "z must be [B, T, h] and v [B, T, d]": {"v": torch.zeros(1, 3, D)},
    "the layout is for [1, 4] tokens, but z has [1, 5]": {"layout": ChunkLayout.from_lengths([[4]], 3)},
    "weight must be [d, h] = [5, 6], got [6, 5]": {"weight": torch.zeros(H, D)},
    "must have one dtype, got torch.float32, torch.bfloat16": {"v": torch.zeros(1, 5, D, dtype=torch.bfloat16)},
    "initial_state must be [B, d, h] = [1, 5, 6]": {"initial_state": torch.zeros(2, D, H)},
    "initial_state must be torch.float32": {"initial_state": torch.zeros(1, D, H, dtype=torch.float64)},
    "gate belongs to the ridge rule; with the sum of writes": {"gate": torch.ones(1, 5)},
    "gate must be floating-point numbers [B, T] = [1, 5], got torch.float32 [1, 4]": {"gate": torch.ones(1, 4), "rule": RidgeRule(0.5)},
    "backend 'fast' does not exist; choose": {"backend": "fast"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused(message: str) -> None:
    given = {
        "z": torch.zeros(1, 5, H),
        "v": torch.zeros(1, 5, D),
        "weight": torch.zeros(D, H),
        "layout": ChunkLayout.from_lengths([[5]], 3),
    }
    with pytest.raises(InPlaceTTTError) as error:
        fast_weight(**{**given, **REFUSED[message]}, eta=1.0)
    assert message in str(error.value)


@pytest.mark.parametrize("size", [2e4, 1e-7], ids=["S beyond float16", "S below float16"])
@pytest.mark.parametrize("documents", ["one", "packed", "unequal rows"])
def test_float16_reads_the_effective_weight_whatever_the_state(documents: str, size: float) -> None:
    """What a model reads is ηS; S alone, and its gradient, may lie outside the range of float16."""
    layout = layout_of(documents, 3)
    made = {name: x.detach() * size**0.5 for name, x in inputs(layout, torch.float32, False, False).items()}
    given = {name: x.half().requires_grad_() for name, x in made.items()}
    found, expected = ({} for _ in range(2))
    for backend, results in (("chunked", found), ("reference", expected)):
        out = fast_weight(given["z"], given["v"], None, eta=0.1 / size, layout=layout, backend=backend)
        g = torch.Generator().manual_seed(4)
        loss = (out.float() * torch.randn(out.shape, generator=g)).sum()
        results |= {
            "out": out,
            **dict(zip("zv", torch.autograd.grad(loss, [given["z"], given["v"]]), strict=True)),
        }
    for name, value in expected.items():
        assert value.any() and distance(found[name], value) < 5e-3, name

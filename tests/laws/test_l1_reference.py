"""L1: the chunked op is the reference, in outputs and in every gradient."""

import itertools

import pytest
import torch
from models import distance
from op_runs import CASES, CHUNK_SIZES, CLIPS, DOCUMENTS, ETA, TOLERANCE, D, H, inputs, layout_of, run
from torch import Tensor

from inplace_ttt import InPlaceTTTError
from inplace_ttt.layer.target import TargetGenerator
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import (
    fast_weight,
)
from inplace_ttt.rules import RidgeRule, SumRule


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

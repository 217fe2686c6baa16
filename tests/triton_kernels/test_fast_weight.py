"""The kernels are the reference, in outputs and in every gradient; without a GPU, through Triton's
interpreter."""

import itertools

import pytest
import torch
from models import distance
from torch import Tensor

from inplace_ttt.kernels import operands, products, walk
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight, state_dtype

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
ETA = 0.3

# name -> documents of each row in eighths of a chunk (rounded), and the row length with its padding
DOCUMENTS: dict[str, tuple[list[list[tuple[int, int]]], int]] = {
    "one": ([[(0, 37)]], 37),
    "whole chunks": ([[(0, 32)]], 32),
    "packed": ([[(0, 5), (5, 24), (24, 41)]], 41),
    "unequal rows": ([[(0, 19)], [(0, 2), (2, 3), (3, 22)], [], [(0, 1)]], 25),
    "padding all around": ([[(2, 13), (13, 34)]], 35),
    "only padding": ([[]], 4),
}
# chunk size, d, h: tiles by descriptor (whole tiles deep, rows of 16 bytes), two of them each way, and by
# pointer; documents of up to 51 tokens in the dual form, beside walks
SHAPES = {"descriptors": (32, 40, 72), "pointers": (13, 17, 35), "short documents": (8, 40, 72)}
CLIPS = {"free": None, "biting": 60.0, "tensor": torch.tensor(90.0)}
CASES = [
    (clip, start, keep, w0)
    for start, keep, w0 in itertools.product((False, True), repeat=3)
    for clip in CLIPS
]


def layout_of(name: str, chunk_size: int) -> ChunkLayout:
    rows, length = DOCUMENTS[name]
    scaled = [[tuple(edge * chunk_size // 8 for edge in document) for document in row] for row in rows]
    return ChunkLayout(tuple(map(tuple, scaled)), length * chunk_size // 8, chunk_size)  # type: ignore[arg-type]


def inputs(
    layout: ChunkLayout, d: int, h: int, dtype: torch.dtype, start: bool, w0: bool
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    shape = (layout.batch, layout.length)
    made = {"z": torch.randn(*shape, h, generator=g), "v": torch.randn(*shape, d, generator=g)}
    if w0:
        made["weight"] = torch.randn(d, h, generator=g)
    made = {name: x.to(DEVICE, dtype) for name, x in made.items()}
    if start:
        made["initial_state"] = torch.randn(layout.batch, d, h, generator=g).to(DEVICE, state_dtype(dtype))
    return {name: x.requires_grad_() for name, x in made.items()}


def run(
    backend: str, layout: ChunkLayout, given: dict[str, Tensor], clip: float | Tensor | None, keep: bool
) -> dict[str, Tensor]:
    """Everything the op gives: outputs, state, and the gradient of each input under a random cotangent."""
    result = fast_weight(
        given["z"], given["v"], given.get("weight"), eta=ETA, layout=layout, initial_state=given.get("initial_state"), clip=clip,
        backend=backend, return_state=keep,
    )  # fmt: skip
    results = dict(zip(("out", "state"), result, strict=True)) if keep else {"out": result}
    g = torch.Generator().manual_seed(4)
    loss = sum((x * torch.randn(x.shape, generator=g).to(x)).sum() for x in results.values())
    grads = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    for name, x, grad in zip(given, given.values(), grads, strict=True):
        results[f"d_{name}"] = torch.zeros_like(x) if grad is None else grad
    return {name: x.detach() for name, x in results.items()}


def check(layout: ChunkLayout, shape: str, dtype: torch.dtype, case: tuple[str, bool, bool, bool]) -> None:
    clip, start, keep, w0 = case
    given = inputs(layout, *SHAPES[shape][1:], dtype, start, w0)
    expected = run("reference", layout, given, CLIPS[clip], keep)
    found = run("triton", layout, given, CLIPS[clip], keep)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and value.shape == expected[name].shape
        error = distance(value, expected[name])
        assert error < TOLERANCE[dtype], (
            f"{name} is {error:.1e} off with clip {clip}, start {start}, state {keep}, weight {w0}"
        )


PLACES = list(itertools.product(DOCUMENTS, SHAPES))


@pytest.mark.parametrize(("documents", "shape"), PLACES)
@pytest.mark.sample(5)
def test_the_kernels_are_the_reference(documents: str, shape: str) -> None:
    """Each case of the table at one place or more, each place with three cases, among them every clip."""
    first = PLACES.index((documents, shape)) * 2
    for case in [CASES[(first + step) % len(CASES)] for step in (0, 7, 17)]:
        check(layout_of(documents, SHAPES[shape][0]), shape, torch.float32, case)


@pytest.mark.parametrize(("documents", "shape"), PLACES[: -len(SHAPES)])
@pytest.mark.sample(2)
def test_in_bfloat16(documents: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = PLACES.index((documents, shape))
    chunk, d, h = SHAPES[shape]
    # groups of two slots, so that a document takes several
    monkeypatch.setattr(operands, "SLOTS_BYTES", 2 * d * h * 2)
    if number % 2:
        monkeypatch.setattr(products, "multiprocessors", lambda device: 1)  # full with a product for each run
    for case in (CASES[number * 5 % len(CASES)], CASES[(number * 5 + 8) % len(CASES)]):
        check(layout_of(documents, chunk), shape, torch.bfloat16, case)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sample(1)
def test_in_float16(shape: str) -> None:
    check(layout_of("packed", SHAPES[shape][0]), shape, torch.float16, ("free", True, True, True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.full
def test_every_output_is_written(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fresh memory full of NaN instead of whatever lies there, nothing changes."""
    layout = layout_of("unequal rows", SHAPES[shape][0])
    cases = [
        (inputs(layout, *SHAPES[shape][1:], torch.float32, start, w0), clip, keep)
        for clip, start, keep, w0 in CASES[::11]
    ]
    expected = [run("triton", layout, given, CLIPS[clip], keep) for given, clip, keep in cases]

    def poisoned(make):
        def filled(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return filled

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(Tensor, name, poisoned(getattr(Tensor, name)))
    for (given, clip, keep), values in zip(cases, expected, strict=True):
        for name, value in run("triton", layout, given, CLIPS[clip], keep).items():
            assert torch.equal(value, values[name]), name


def test_the_longest_document_that_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """51 tokens at 40 × 72; a clip, a state and float16 take the walk. W0's gradient is a walk too and not
    asked for."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("walked")

    def walks(
        tokens: int, clip: float | None = None, start: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        layout = ChunkLayout.from_lengths([[tokens, 3, 24]], 8)
        given = inputs(layout, 40, 72, dtype, start, w0=True)
        given["weight"] = given["weight"].detach()
        z = given["z"]
        try:
            out = fast_weight(**given, eta=ETA, layout=layout, clip=clip, backend="triton")
            grads = torch.autograd.grad(out.sum(), (z, given["v"]))
        except AssertionError:
            return True
        assert out.isfinite().all() and all(grad[:, tokens + 3 :].any() for grad in grads)
        return False

    monkeypatch.setattr(walk, "run_tuned", refuse)
    assert not walks(51) and walks(52)
    assert walks(51, clip=60.0) and walks(51, start=True) and walks(51, dtype=torch.float16)


def test_rows_of_a_larger_tensor_and_a_transposed_weight() -> None:
    """Strided inputs: z and v as columns of wider tensors, W0 as `Conv1D` keeps it."""
    layout = layout_of("packed", 16)
    given = inputs(layout, 24, 40, torch.float32, start=False, w0=True)
    expected = run("triton", layout, given, None, keep=False)
    wide = {name: torch.cat([x, x], dim=-1).detach() for name, x in given.items() if name != "weight"}
    strided = {name: x[..., : x.shape[-1] // 2].requires_grad_() for name, x in wide.items()}
    strided["weight"] = given["weight"].detach().T.contiguous().T.requires_grad_()
    found = run("triton", layout, strided, None, keep=False)
    assert all(distance(found[name], expected[name]) < 1e-6 for name in expected)

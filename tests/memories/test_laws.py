"""Each memory's parallel form is its primal form: outputs, state and every gradient, at any length, split and
start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import distance
from torch import Tensor
from torch.utils import _pytree as pytree

from inplace_ttt.memories import MEMORIES, Memory, detached, state_bytes
from memories.systems import CHUNK, SYSTEMS, inputs, leaves, system

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
SPLITS = {
    "one call": [17],
    "single tokens": [1] * 17,
    "pieces": [3, 2, 1, 6, 5],
    "chunks": [5, 5, 5, 2],
    "empty pieces never": [16, 1],
}
Form = Callable[[Tensor, Any], tuple[Tensor, Any]]


def in_pieces(memory: Memory[Any], sizes: list[int]) -> Form:
    def run(x: Tensor, state: Any) -> tuple[Tensor, Any]:
        read = []
        for piece in x.split(sizes, dim=1):
            y, state = memory(piece, state)
            read.append(y)
        return torch.cat(read, dim=1), state

    return run


def everything(
    memory: Memory[Any], form: Form, length: int, start: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs, final state, and the gradients of x, every parameter and the initial state under random
    cotangents."""
    x = inputs(length, dtype=dtype).requires_grad_()
    state, given = None, {"x": x, **dict(memory.named_parameters())}
    if start:  # a state in the middle of a chunk, as an input of its own
        state = pytree.tree_map_only(
            Tensor, lambda s: s.detach().clone().requires_grad_(), memory.primal(x.detach()[:, :7])[1]
        )
        given |= {f"initial {i}": leaf for i, leaf in enumerate(leaves(state))}
    y, final = form(x, state)
    results = {"y": y, **{f"final {i}": leaf for i, leaf in enumerate(leaves(final)) if leaf.numel()}}
    g = torch.Generator().manual_seed(5)
    loss = sum(
        (r * torch.randn(r.shape, generator=g, dtype=torch.float64).to(r.dtype)).sum()
        for r in results.values()
    )
    grads = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
    for name, value, grad in zip(given, given.values(), grads, strict=True):
        results[f"d {name}"] = torch.zeros_like(value) if grad is None else grad
    return {name: value.detach() for name, value in results.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and distance(value, expected[name]) < tolerance, name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("start", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize("row", SYSTEMS)
def test_parallel_is_primal(row: str, start: bool, dtype: torch.dtype) -> None:
    memory = system(row, dtype)
    for length in (1, 4, 5, 17) if dtype == torch.float64 else (17,):
        expected = everything(memory, memory.primal, length, start, dtype)
        assert_same(everything(memory, memory, length, start, dtype), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("split", list(SPLITS)[1:])
@pytest.mark.parametrize("row", SYSTEMS)
def test_any_split_is_one_call(row: str, split: str) -> None:
    memory = system(row)
    for start in (False, True):
        expected = everything(memory, memory, 17, start, torch.float64)
        assert_same(
            everything(memory, in_pieces(memory, SPLITS[split]), 17, start, torch.float64), expected, 1e-9
        )


@pytest.mark.parametrize("row", SYSTEMS)
def test_everything_matters(row: str) -> None:
    """What the laws compare is not zero: tokens write, and every parameter and part of the state has a
    gradient."""
    memory = system(row)
    for start in (False, True):
        for name, value in everything(memory, memory, 17, start, torch.float64).items():
            # the learned start of a sequence that starts elsewhere
            ignored = start and name.startswith("d initial.")
            assert value.numel() == 0 or ignored or value.abs().max() > 1e-6, name
    x = inputs(2 * CHUNK + 1)
    y, other = memory(x)[0], memory(torch.cat([inputs(2 * CHUNK, seed=6), x[:, -1:]], dim=1))[0]
    assert (y[:, -1] - other[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("row", SYSTEMS)
def test_rows_and_tokens_to_come_change_nothing(row: str) -> None:
    memory, x = system(row), inputs(13)
    y = memory(x)[0]
    assert distance(memory(x[1:2])[0], y[1:2]) < 1e-12
    changed = torch.cat([x[:, :8], inputs(5, seed=7)], dim=1)
    assert distance(memory(changed)[0][:, :8], y[:, :8]) < 1e-12
    assert distance(memory(changed)[0][:, 8:], y[:, 8:]) > 1e-3


@pytest.mark.parametrize("row", SYSTEMS)
def test_the_state_is_a_value(row: str) -> None:
    memory, x = system(row), inputs(12)
    names = set(memory.state_dict())
    _, state = memory(x[:, :7])
    before = [leaf.clone() for leaf in leaves(state)]
    first, second = memory(x[:, 7:], state), memory(x[:, 7:], state)
    assert first[0].equal(second[0]) and all(
        a.equal(b) for a, b in zip(leaves(first[1]), leaves(second[1]), strict=True)
    )
    assert all(a.equal(b) for a, b in zip(leaves(state), before, strict=True))
    assert set(memory.state_dict()) == names and not list(memory.buffers())
    assert state_bytes(state) == sum(leaf.numel() * 8 for leaf in before) > 0
    assert not any(leaf.requires_grad for leaf in leaves(detached(state)))


@pytest.mark.parametrize("row", SYSTEMS)
def test_recall_reads_and_writes_nothing(row: str) -> None:
    """A token's output is what the state answers to it, before or after its own update."""
    memory, x = system(row), inputs(9)
    _, before = memory(x[:, :8])
    y, after = memory(x[:, 8:], before)
    assert distance(memory.recall(x[:, 8:], before if memory.reads_first else after), y) < 1e-12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("row", SYSTEMS)
def test_without_gradients(row: str, mode: Callable[[], Any]) -> None:
    memory, x = system(row), inputs(12)
    expected = memory(x)[0]
    with mode():
        first, state = memory(x[:, :7])
        second, state = memory(x[:, 7:], state)
        law, _ = memory.primal(x)
    assert not second.requires_grad and not any(leaf.requires_grad for leaf in leaves(state))
    assert (
        distance(torch.cat([first, second], dim=1), expected.detach()) < 1e-12
        and distance(law, expected.detach()) < 1e-9
    )


@pytest.mark.parametrize("row", SYSTEMS)
def test_half_precision_keeps_a_float32_state(row: str) -> None:
    memory, x = system(row, torch.bfloat16), inputs(12, dtype=torch.bfloat16)
    y, state = memory(x)
    assert y.dtype == torch.bfloat16 and {leaf.dtype for leaf in leaves(state)} == {torch.float32}
    y.float().sum().backward()
    exact = system(row, torch.float64)(x.double())[0]
    assert (y.double() - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("row", SYSTEMS)
def test_recall_under_autocast_is_the_layer(row: str) -> None:
    memory, x = system(row, torch.float32), inputs(9, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, before = memory(x[:, :8])
        y, after = memory(x[:, 8:], before)
        found = memory.recall(x[:, 8:], before if memory.reads_first else after)
    assert found.dtype == y.dtype and distance(found, y) < 1e-2


def test_every_system_is_in_the_table() -> None:
    assert {name for name, _ in SYSTEMS.values()} == set(MEMORIES)

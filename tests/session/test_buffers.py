"""What a `State` reads is what its rows hold now, whatever was put, copied, chosen and read before."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from models import LAYERS, RIDGE, converted, random_ids
from torch import Tensor

from inplace_ttt import Session
from inplace_ttt.layer import buffers
from inplace_ttt.layer.buffers import State
from inplace_ttt.ops import form_of, keeping_row_norms
from inplace_ttt.ops.forms import Form
from inplace_ttt.rules import RidgeRule, Rule, SumRule

D, R, ETA = 5, 4, 0.5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.005}
SUM, ROWS, SOLVED = SumRule(), SumRule(preserve_row_norms=True), RidgeRule(0.1)
RULES = [SUM, ROWS, SOLVED]
NAMED = ["the sum", "the sum, row norms kept", "least squares"]


@dataclass
class Layer:
    """Reads as a layer with W0 does."""

    w0: Tensor
    eta: float = ETA

    def readout(self, state: Tensor) -> Tensor:
        return keeping_row_norms(state, self.w0.to(state.dtype), self.eta)


def drawn(generator: torch.Generator, rule: Rule) -> Tensor:
    """A row's state as writes of nine keys leave it."""
    keys, values = (torch.randn(9, n, generator=generator, dtype=torch.float64) for n in (R, D))
    total = values.T @ keys
    return torch.cat([total, keys.T @ keys])[: rule.state_rows(D, R)]


def expected(state: State, z: Tensor, layer: Layer, row: int) -> Tensor:
    """What keys [n, r] read in a row [n, d], η included, in float64 from what it holds."""
    held = state.value[row].double()
    if state.rule.keeps_row_norms:
        return layer.eta * z.double() @ layer.readout(held).T
    if not isinstance(state.rule, RidgeRule):
        return layer.eta * z.double() @ held.T
    gram = held[D:] + state.rule.ridge * torch.eye(R, dtype=torch.float64)
    return layer.eta * torch.linalg.solve(gram, z.double().T).T @ held[:D].T


def assert_reads(found: Tensor, wanted: Tensor) -> None:
    assert float((found.double() - wanted).norm()) <= TOLERANCE[found.dtype] * max(1.0, float(wanted.norm()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rule", RULES, ids=NAMED)
def test_any_order_of_writes_and_reads(rule: Rule, dtype: torch.dtype) -> None:
    generator, choose = torch.Generator().manual_seed(0), random.Random(0)
    layer = Layer(torch.randn(D, R, generator=generator, dtype=torch.float64))
    accurate = torch.float64 if dtype == torch.float64 else torch.float32
    state = State(torch.stack([drawn(generator, rule) for _ in range(3)]).to(accurate), rule)
    reads = 0
    for _ in range(300):
        row = choose.randrange(3)
        match choose.choice(["put", "copy", "select", "one row", "all rows"]):
            case "put":
                state.put(row, None if choose.random() < 0.1 else drawn(generator, rule).to(accurate))
            case "copy":
                state.copy_row(row, (row + 1) % 3)
            case "select":
                state = state.select([choose.randrange(3) for _ in range(3)])
            case which:
                rows, tokens, reads = (
                    [row] if which == "one row" else [0, 1, 2],
                    choose.randrange(1, D + 3),
                    reads + 1,
                )
                z = torch.randn(len(rows), tokens, R, generator=generator, dtype=torch.float64).to(dtype)
                out = torch.zeros(len(rows), tokens, D, dtype=dtype)
                state.add_read(
                    out, z, layer, row if which == "one row" else None, whole=choose.random() < 0.5
                )
                for found, keys, number in zip(out, z, rows, strict=True):
                    assert_reads(found, expected(state, keys, layer, number))
    assert reads > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["the sum", "least squares"])
def test_rows_of_slots(rule: Rule, dtype: torch.dtype) -> None:
    """As a server holds them: lent without being cleared, one token of each read at once, one's memory copied
    to another."""
    generator, choose = torch.Generator().manual_seed(0), random.Random(0)
    layer = Layer(torch.zeros(D, R))
    state = State.empty(3, (rule.state_rows(D, R), R), D, dtype, rule, torch.device("cpu"))
    for row in range(3):
        state.put(row, drawn(generator, rule).float())
    for _ in range(100):
        row, other = choose.sample(range(3), 2)
        state.copy_row(row, other) if choose.random() < 0.3 else state.put(
            row, drawn(generator, rule).float()
        )
        rows = choose.sample(range(3), choose.randrange(1, 4))
        z = torch.randn(len(rows), R, generator=generator).to(dtype)
        out = torch.zeros(len(rows), D, dtype=dtype)
        state.refresh(rows)
        state.add_reads_of(torch.arange(len(rows)), torch.tensor(rows), out, z, ETA)
        for found, key, number in zip(out, z, rows, strict=True):
            assert_reads(found, expected(state, key[None], layer, number)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [True, False], ids=["a whole chunk", "single tokens"])
def test_autocast_leaves_reads_alone(whole: bool, dtype: torch.dtype) -> None:
    """Sums may lie outside the range of float16, and both ways to read are exact where keys are alike, so
    that solves are large."""
    generator = torch.Generator().manual_seed(0)
    layer = Layer(torch.zeros(D, R), eta=1e-4)
    keys, values, z = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((9, R), (9, D), (1, D - 1, R))
    )
    keys, z = (x * 0.2 + x[..., :1] for x in (keys, z))
    state = State(torch.cat([1e5 * values.T @ keys, keys.T @ keys]).float()[None], SOLVED)
    z, out = z.to(dtype), torch.zeros(1, D - 1, D, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        state.add_read(out, z, layer, whole=whole)
    wanted = expected(state, z[0], layer, 0)
    assert float((out[0].double() - wanted).norm()) <= torch.finfo(dtype).eps * float(wanted.norm())


def observed(rule: Rule, see: Callable[[Tensor], None]) -> Form:
    """The form of a rule, with a look at the states of each readout."""
    form = form_of(rule)
    return dataclasses.replace(
        form, readout=lambda states, rule: (see(states), form.readout(states, rule))[1]
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_each_row_is_solved_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the rows of a batch are read: alone, behind whole chunks, or together."""
    model, solved = converted("llama", **RIDGE), 0

    def counting(states: Tensor) -> None:
        nonlocal solved
        solved += len(states)

    monkeypatch.setattr(buffers, "form_of", lambda rule: observed(rule, counting))
    state, once = Session(model), batch * len(LAYERS)
    # three chunks of 7, the last of which rows write one by one, and three tokens that read it
    state.read(random_ids(batch, 24))
    assert solved == once
    state.read(random_ids(batch, 3))
    assert solved == once, "nothing was written"
    state.read(random_ids(batch, 1))
    state.read(random_ids(batch, 1))
    assert solved == 2 * once


def test_rows_that_are_read_together_are_solved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, calls = torch.Generator().manual_seed(0), list[int]()
    monkeypatch.setattr(
        buffers, "form_of", lambda rule: observed(rule, lambda states: calls.append(len(states)))
    )
    state = State(torch.stack([drawn(generator, SOLVED) for _ in range(4)]), SOLVED)
    layer, z = Layer(torch.zeros(D, R)), torch.randn(4, 1, R, generator=generator, dtype=torch.float64)
    for row in (2, None, 0, None):
        read = z if row is None else z[row : row + 1]
        state.add_read(torch.zeros(len(read), 1, D, dtype=z.dtype), read, layer, row)
    assert calls == [1, 3]


def test_row_norms_are_kept_at_the_eta_of_the_read() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Layer(torch.randn(D, R, generator=generator, dtype=torch.float64))
    state = State(torch.stack([drawn(generator, ROWS) for _ in range(2)]), ROWS)
    for layer.eta in (0.5, 0.1, 0.5, 0.0):
        for row in (0, None):
            z = torch.randn(2, 3, R, generator=generator, dtype=torch.float64)[: 1 if row == 0 else 2]
            out = torch.zeros(len(z), 3, D, dtype=torch.float64)
            state.add_read(out, z, layer, row)
            for number, (found, keys) in enumerate(zip(out, z, strict=True)):
                assert_reads(found, expected(state, keys, layer, number))


def test_a_row_counts_all_that_it_holds() -> None:
    for dtype, factor in ((torch.bfloat16, 0), (torch.float16, 4)):
        state = State.empty(3, (D + R, R), D, dtype, SOLVED, torch.device("cpu"))
        assert state.row_bytes == (D + R) * R * 4 + D * R * 2 + factor

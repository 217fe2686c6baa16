"""L1 for TTT-NTP's norms: the walk is the reference with writes divided by their spectral norm and with W0's
row norms kept."""

import itertools
from typing import Any

import pytest
import torch
from models import distance
from op_runs import DOCUMENTS, ETA, TOLERANCE, D, H, inputs, layout_of
from op_runs import run as results_of
from torch import Tensor

from inplace_ttt import InPlaceTTTError
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import fast_weight, keeping_row_norms
from inplace_ttt.ops.norms import spectral_norm
from inplace_ttt.rules import RidgeRule, SumRule

RULES: dict[str, dict[str, Any]] = {
    "spectral": {"write_norm": "spectral"},
    "rows": {"rows": True},
    "rows, clip": {"rows": True, "clip": 0.4},
    "both": {"write_norm": "spectral", "rows": True},
}
CASES = list(itertools.product((False, True), repeat=3))


def given_for(
    layout: ChunkLayout, dtype: torch.dtype, start: bool, w0: bool, rows: bool
) -> dict[str, Tensor]:
    given = inputs(layout, dtype, start, w0)
    if rows:
        made = torch.randn(D, H, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        made[0] = 0  # a row of W0 that is zero stays so
        given["keep_norms_of"] = made.to(dtype).requires_grad_()
    return given


def run(
    backend: str, layout: ChunkLayout, given: dict[str, Tensor], keep: bool, **rule: Any
) -> dict[str, Tensor]:
    """`results_of` by a rule of RULES."""
    made = SumRule(write_norm=rule.get("write_norm"), preserve_row_norms=rule.get("rows", False))
    settings = {"eta": rule["eta"]} if "eta" in rule else {}
    return results_of(backend, layout, given, rule.get("clip"), keep, rule=made, **settings)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_the_walk_is_the_reference(rule: str, documents: str, dtype: torch.dtype) -> None:
    for chunk_size, (start, keep, w0) in itertools.product(
        (1, 3), CASES[::3] if dtype == torch.float64 else CASES[1::5]
    ):
        layout = layout_of(documents, chunk_size)
        given = given_for(layout, dtype, start, w0, RULES[rule].get("rows", False))
        expected = run("reference", layout, given, keep, **RULES[rule])
        found = run("auto", layout, given, keep, **RULES[rule])
        for name, value in found.items():
            assert value.dtype == expected[name].dtype and value.shape == expected[name].shape
            where = (
                f"{name} with chunks of {chunk_size}, initial_state {start}, return_state {keep}, weight {w0}"
            )
            # where nothing was written it is zero, but for rounding
            beside = 1 if name == "d_keep_norms_of" else 0
            assert distance(value + beside, expected[name] + beside) < 3 * TOLERANCE[dtype], where


def test_the_table_bites() -> None:
    layout = layout_of("unequal rows", 3)
    free = run("reference", layout, given_for(layout, torch.float64, True, True, False), keep=True)
    found = {}
    for rule, options in RULES.items():
        found[rule] = run(
            "reference",
            layout,
            given_for(layout, torch.float64, True, True, "rows" in options),
            keep=True,
            **options,
        )
        assert distance(found[rule]["out"], free["out"]) > 0.05, rule
    assert distance(found["both"]["out"], found["rows"]["out"]) > 0.05
    assert torch.equal(found["rows"]["state"], free["state"]), "row norms act on what is read alone"


def test_gradcheck() -> None:
    layout = ChunkLayout((((0, 5), (6, 9)), ((1, 8),)), 9, 3)
    given = given_for(layout, torch.float64, True, True, rows=True)
    # a norm has no derivative at zero
    given["keep_norms_of"] = (given["keep_norms_of"].detach() + 1).requires_grad_()

    def op(*tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        values = dict(zip(given, tensors, strict=True))
        return fast_weight(
            **values,
            eta=ETA,
            layout=layout,
            rule=SumRule("spectral", preserve_row_norms=True),
            return_state=True,
        )

    assert torch.autograd.gradcheck(op, tuple(given.values()))


def test_a_write_of_rank_one_is_divided_by_its_norm() -> None:
    delta = torch.outer(torch.randn(D, dtype=torch.float64), torch.randn(H, dtype=torch.float64))
    assert abs(float(spectral_norm(delta)) / float(torch.linalg.vector_norm(delta)) - 1) < 1e-12


def test_five_steps_from_the_mean_row_are_near_the_largest_singular_value() -> None:
    delta = torch.randn(7, 30, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ratio = spectral_norm(delta)[:, 0, 0] / torch.linalg.matrix_norm(delta, 2)
    assert (ratio <= 1 + 1e-12).all() and (ratio > 0.8).all()


def test_rows_keep_their_norm_and_only_that() -> None:
    g = torch.Generator().manual_seed(0)
    w0, state = (torch.randn(D, H, generator=g, dtype=torch.float64) for _ in range(2))
    read, raw = w0 + ETA * keeping_row_norms(state, w0, ETA), w0 + ETA * state
    assert distance(read.norm(dim=1), w0.norm(dim=1)) < 1e-12
    assert distance(torch.cosine_similarity(read, raw, dim=1), torch.ones(D, dtype=torch.float64)) < 1e-12
    assert not keeping_row_norms(torch.zeros_like(w0), w0, ETA).any()
    tiny = w0 * 1e-7  # too small for the norm that divides: it is left as it is
    assert not keeping_row_norms(torch.zeros_like(w0), tiny, ETA).any()


def test_eta_zero_reads_w0() -> None:
    layout = layout_of("packed", 3)
    given = given_for(layout, torch.float64, True, False, rows=True)
    assert not run("auto", layout, given, keep=False, rows=True, eta=0.0)["out"].any()


REFUSED = {
    "leave it out with this rule": {"rule": RidgeRule(0.5), "keep_norms_of": torch.zeros(D, H)},
    "leaves a clip nothing to bound": {"clip": 1.0, "rule": SumRule("spectral")},
    r"must be W0 .*, got \[": {"keep_norms_of": torch.zeros(H, D), "rule": SumRule(preserve_row_norms=True)},
    "must be W0 .*, got nothing": {"rule": SumRule(preserve_row_norms=True)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_sense_is_refused(message: str) -> None:
    layout = layout_of("one", 8)
    with pytest.raises(InPlaceTTTError, match=message):
        fast_weight(
            **inputs(layout, torch.float32, False, False),
            weight=None,
            eta=ETA,
            layout=layout,
            **REFUSED[message],
        )

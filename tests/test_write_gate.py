"""A gate of writes: nothing before it has learned, learned with P, and saved with the model."""

from pathlib import Path

import pytest
import torch
from models import LAYERS, RIDGE, converted, distance, logits, random_ids

from inplace_ttt import load
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.layer.write_gate import WriteGate
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.loop.parameters import parameter_groups
from inplace_ttt.training.recipe.training_section import Training

IDS = random_ids(1, 40)
UNGATED = {**RIDGE, "write_gate": False}


def test_it_begins_at_one() -> None:
    gated, plain = converted("llama", **RIDGE), converted("llama", **UNGATED)
    assert distance(logits(gated, IDS), logits(plain, IDS)) > 1e-2, "a gate that has learned must be visible"
    for layer in fast_weights(gated).values():
        layer.ttt.gate.data.zero_()  # type: ignore[union-attr]
    assert torch.equal(logits(gated, IDS), logits(plain, IDS))


def test_a_token_that_counts_nothing_is_not_remembered() -> None:
    """With the bias far below zero nothing is written, and the model computes what its base does."""
    model, base = converted("llama", **RIDGE), converted("llama", writes=False, **UNGATED)
    for layer in fast_weights(model).values():
        gate = layer.ttt.gate.data  # type: ignore[union-attr]
        gate.zero_()[-1] = -60
    assert distance(logits(model, IDS), logits(base, IDS)) < 1e-6


@pytest.mark.parametrize("where", LAYERS)
@pytest.mark.parametrize("own", [None, 5e-2], ids=["of P", "its own"])
def test_its_rate_is_that_of_p_or_its_own(own: float | None, where: int) -> None:
    model = converted("llama", **RIDGE)
    gate = fast_weights(model)[where].ttt.gate  # type: ignore[union-attr]
    settings = Training(steps=1, proj_learning_rate=3e-3, gate_learning_rate=own)
    groups = parameter_groups(model, settings)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    (group,) = (g for g in groups if any(p is gate for p in g["params"]))
    assert (group["name"], group["lr"], group["weight_decay"]) == ("gate", own or 3e-3, 0)
    assert next(g["lr"] for g in groups if g["name"] == "proj") == 3e-3
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert gate.grad is not None and bool(gate.grad[:-1].any()) and bool(gate.grad[-1])


def test_a_rate_without_a_gate_is_refused() -> None:
    with pytest.raises(InPlaceTTTError, match="gate_learning_rate does nothing"):
        parameter_groups(converted("llama"), Training(steps=1, gate_learning_rate=1e-2))


def test_it_is_saved(tmp_path: Path) -> None:
    model = converted("llama", **RIDGE)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path), IDS), logits(model, IDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_accurate_under_autocast(dtype: torch.dtype) -> None:
    """As the sums that it weighs are, which autocast leaves alone."""
    gate, keys = WriteGate(64), torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) / 8
    gate.gate.data.normal_(generator=torch.Generator().manual_seed(1))
    expected = gate(keys)
    with torch.autocast("cpu", dtype):
        found = gate(keys)
    assert found.dtype == torch.float32 and torch.equal(found, expected)

"""Diagnoses of models with `target: gradient`: writes, effects and safe η; nothing about conv and P."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import RIDGE, random_ids, seven_layers

from inplace_ttt import InPlaceTTTError
from inplace_ttt.diagnostics import diagnose

RULES: dict[str, dict[str, Any]] = {
    "sum": {},
    "ridge": {"update_rule": "ridge", "ridge": 0.5, "whitening": RIDGE["whitening"]},
}


def diagnosed(eta: float, **settings: Any) -> Any:
    model = seven_layers(target="gradient", chunk_size=16, eta=eta, **settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = diagnose(model, {"input_ids": random_ids(1, 100)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.sample(1)
def test_a_sound_model_has_no_severe_finding(rule: str) -> None:
    found = diagnosed(0.1, **RULES[rule])
    assert [finding.id for finding in found.findings if finding.severity == "severe"] == []
    layer = found.to_dict()["layers"][0]
    assert layer["writes"]["state_ratio"] > 0 and layer["effect"]["logit_change"] > 0
    assert "safe-range" in [finding.id for finding in found.findings]


def test_an_eta_that_hurts_is_found() -> None:
    found = diagnosed(300.0)
    assert {"writes-too-large", "writes-hurt"} & {finding.id for finding in found.findings}
    (safe,) = [finding for finding in found.findings if finding.id == "safe-range"]
    assert safe.numbers["safe"] is None or safe.numbers["safe"] < 300


def test_several_steps_per_chunk_are_refused() -> None:
    with pytest.raises(InPlaceTTTError, match="diagnose a conversion with steps_per_chunk=1"):
        diagnosed(0.1, steps_per_chunk=2)

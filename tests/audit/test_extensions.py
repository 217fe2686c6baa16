"""Least squares and whitened keys: named as extensions, with no false alarm, and each planted fault with one
owner."""

import pytest
import torch
from families import build
from models import seven_layers

from audit.extension_mutations import CLIPPED, EXTENSION, RAW, RIDGE
from audit.mutation import Mutation, expected
from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, KeyWhitening, UpdateClip, convert
from inplace_ttt.audit import audit_model
from inplace_ttt.audit.limits import limits
from inplace_ttt.audit.probed import Probed
from inplace_ttt.audit.scenes import plain
from inplace_ttt.rules import RidgeRule

BEYOND = [
    "loss-sum",
    "no-normalization",
    "plain-sum",
    "keys",
    "least-squares",
    "eta",
    "start-projection",
    "extensions",
]


@pytest.mark.parametrize("mutation", EXTENSION, ids=lambda m: m.what)
@pytest.mark.sample(1)
def test_a_fault_has_one_owner(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(mutation.report(monkeypatch).undeclared) == expected(mutation)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["paper", "reference"])
def test_the_compact_preset_is_an_extension(profile: str) -> None:
    # of 1,024 directions all 48 would stay
    changed = {"chunk_size": 1024 if profile == "paper" else 4096, "whitening": {"rank": 0.5}}
    settings = InPlaceTTTConfig.preset("ridge", **changed).to_dict()
    report = audit_model(seven_layers(**settings), profile=profile)
    assert report.undeclared == ([] if profile == "paper" else ["target-source"])
    assert [id for id in BEYOND if report[id].verdict != "extension"] == []
    assert (
        "λ = 1" in report["least-squares"].outcome.found
        and "16 whitened numbers of 48" in report["keys"].outcome.found
    )
    assert [r.item.id for r in report.items if r.verdict == "not checked"] == ["clip-scope", "clip-effect"]


# Ranks below, between and above one and two of the probe's chunks of 12.
@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (1, RAW),
        (2, CLIPPED),
        (4, {**RIDGE, "ridge": 1e-3}),
        (5, {**RIDGE, "ridge": 3.0, "whitening": KeyWhitening(rank=16)}),
        (6, {**RIDGE, "whitening": KeyWhitening(rank=1), "clip": UpdateClip(1e-2)}),
        (8, {"whitening": KeyWhitening(rank=16), "normalize_targets": True}),
        (7, {**RIDGE, "write_gate": True}),
        (10, {**RIDGE, "write_gate": True, "clip": UpdateClip(0.05, relative=True)}),
        (9, {"whitening": KeyWhitening(rank=3), "conv": "causal"}),
    ],
    ids=str,
)
@pytest.mark.sample(1)
def test_no_false_alarm(seed: int, settings: dict) -> None:
    report = audit_model(seven_layers(seed, **settings), seed=seed)
    assert [id for id in report.undeclared if id not in ("conv-lookahead", "clip-effect")] == []
    kept = ["writes", "apply-then-update", "exclusive-sum", "own-chunk-exposure", "causality", "document-reset", "padding", "rows",
            "chunked-prefill", "token-by-token", "stream-reset", "take-back", "saved-session", "context-parallel", "gradient"]  # fmt: skip
    assert [id for id in kept if report[id].verdict != "conforms"] == [], (
        "whatever the rank, these are measured"
    )


@pytest.mark.parametrize(("ridge", "factor"), [(1e-3, 1.0), (0.03, 1.0), (0.03, 1.7)])
def test_the_limit_of_a_solve_follows_its_condition_number(ridge: float, factor: float) -> None:
    """Rounding of a small λ is no fault of the layer, and another λ is one."""
    model = seven_layers(update_rule="ridge", ridge=ridge)
    with Probed.of(model, 0) as probed:
        for layer in probed.layers.values():
            settings = {**layer._settings(), "rule": RidgeRule(factor * ridge)}
            layer._settings = lambda settings=settings: settings  # type: ignore[method-assign]
        (errors,) = probed.deviations(plain).values()
    assert {error < limits(torch.float32).outputs for error in errors.values()} == {factor == 1}


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(InPlaceTTTError, match="are not measured yet"):
        audit_model(convert(build("llama"), InPlaceTTTConfig(**RIDGE)))

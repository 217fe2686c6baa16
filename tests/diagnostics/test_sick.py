"""Each planted cause is named, with where it is, and nothing else severe; a healthy model has nothing
severe."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import build
from models import converted, random_ids
from tiny import word_level

from inplace_ttt import InPlaceTTTConfig, calibrate, convert
from inplace_ttt.diagnostics.diagnosis import Diagnosis, diagnose
from inplace_ttt.diagnostics.write_effects import Change
from inplace_ttt.surgery import config_of, fast_weights

from .faults import FAULTS, in_layer, op_through
from .sick import (
    ODD,
    SICK,
    at_the_papers_start,
    both_small,
    half_precision,
    healthy,
    long_rows,
    one_token_spoiled,
    rows,
    zero_in_one_chunk,
)


def severe(diagnosis: Diagnosis) -> dict[str, set[int]]:
    """Severe causes and their layers."""
    found: dict[str, set[int]] = {}
    for finding in diagnosis.of("severe"):
        found.setdefault(finding.id, set()).update(finding.layers)
    return found


@pytest.mark.parametrize("name", [*SICK, *FAULTS])
@pytest.mark.sample(5)
def test_the_planted_cause_is_found_and_no_other(name: str) -> None:
    sick = {**SICK, **FAULTS}[name]
    model = sick.model()
    with (sick.within or nullcontext)():
        diagnosis = diagnose(model, sick.batch(), learning_rates=sick.rates)
    planted = [f for f in diagnosis.findings if f.id == sick.planted]
    assert {f.severity for f in planted} == {sick.severity}, [f.message for f in diagnosis.findings]
    assert {layer for f in planted for layer in f.layers} == set(sick.layers)
    assert severe(diagnosis).keys() <= {sick.planted}, [f.message for f in diagnosis.findings]
    assert all(f.kind.remedy and f.numbers for f in planted)


@pytest.mark.full
def test_a_token_is_named_by_its_text_where_a_tokenizer_says_it() -> None:
    said = {}
    for tokenizer in (None, word_level(f"w{n}" for n in range(100))):
        (finding,) = (
            f
            for f in diagnose(one_token_spoiled(), long_rows(), tokenizer=tokenizer).findings
            if f.id == "few-tokens-hurt"
        )
        said[finding.numbers["text"]] = finding.message
    assert said[None].endswith(f"where token {ODD} is read") and said["w4"].endswith(
        f"where token {ODD} ('w4') is read"
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_healthy_model_has_nothing_severe(family: str, dtype: torch.dtype) -> None:
    diagnosis = diagnose(converted(family, dtype=dtype), rows())
    assert severe(diagnosis) == {}
    assert {f.id for f in diagnosis.findings if f.severity == "warning"} <= {"keys-collide", "writes-hurt"}


def test_masters_in_float32_keep_every_step() -> None:
    assert [
        f.id
        for f in diagnose(half_precision(), rows()).findings
        if f.id == "updates-rounded" and f.severity == "info"
    ]
    kept = diagnose(half_precision(), rows(), learning_rates=5e-6, float32_masters=True)
    assert "updates-rounded" not in {f.id for f in kept.findings}


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
def test_the_papers_start_is_no_illness(target: str) -> None:
    """P has no gradient there, and that is an info with the number of the step after."""
    diagnosis = diagnose(at_the_papers_start(target=target), rows(), learning_rates=1e-3)
    assert severe(diagnosis) == {}
    (start,) = (f for f in diagnosis.findings if f.id == "zero-init")
    assert start.severity == "info" and start.layers == (0, 2)
    assert start.numbers["conv"] > 0 and start.numbers["proj_after_step"] > 0


def test_nothing_trained_is_no_illness() -> None:
    model = healthy()
    model.requires_grad_(False)
    assert severe(diagnose(model, rows())) == {}
    assert not any(p.requires_grad for p in model.parameters())


def test_conv_and_p_alone_are_trained() -> None:
    model = healthy()
    model.requires_grad_(False)
    for layer in fast_weights(model).values():
        layer.ttt.requires_grad_(True)
    assert severe(diagnose(model, rows())) == {}


def test_two_causes_are_both_named_with_their_shares() -> None:
    diagnosis = diagnose(both_small(), rows())
    assert severe(diagnosis).keys() == {"eta-too-small", "init-too-small"}
    for finding in diagnosis.of("severe"):
        assert 3e4 < finding.numbers["factor"] < 3e5, "each takes a hundred thousandth"


def test_causes_that_hide_each_other_are_both_named() -> None:
    """Conv and P zero, and rows of one chunk: taking either away alone brings nothing back."""
    assert severe(diagnose(zero_in_one_chunk(), rows(7))).keys() == {"zero-times-zero", "one-chunk"}


def test_a_loss_that_is_not_finite_with_weights_that_are() -> None:
    model = healthy()

    def too_large(real: Callable[..., Any], *args: Any, eta: float, **kwargs: Any) -> Any:
        out = real(*args, eta=eta, **kwargs)
        return out if isinstance(out, tuple) or eta == 0 else out * float("inf")

    with in_layer(op_through(too_large), 2)():
        (finding,) = diagnose(model, rows()).of("severe")
    assert finding.id == "not-finite" and finding.layers == (2,) and "with the writes off" in finding.message


def test_a_weight_of_the_base_is_named() -> None:
    model = healthy()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")  # type: ignore[union-attr, index]
    (finding,) = diagnose(model, rows()).of("severe")
    assert (
        finding.id == "weight-not-finite"
        and finding.layers == ()
        and finding.message.startswith("model.norm.weight holds")
    )


@pytest.mark.parametrize("preset", ["paper", "reference", "ridge", "ttt_ntp"])
def test_a_fresh_conversion_of_any_preset_is_healthy(preset: str) -> None:
    model = convert(build("qwen3"), InPlaceTTTConfig.preset(preset, layers=(0, 2), chunk_size=7))
    if config_of(model).needs_calibration:
        calibrate(model, [random_ids(1, 64, seed=2)])
    named = {finding.id for finding in diagnose(model, rows()).findings}
    assert not named & {sick.planted for sick in FAULTS.values()}


def test_harm_is_stated_only_beyond_its_error() -> None:
    """One chunk that reads has no error, two have a wide one."""
    assert not Change(5.0, None).exceeds(0.01)
    assert not Change(0.5, 0.1, chunks=2).exceeds(0.01) and Change(0.5, 0.1, chunks=20).exceeds(0.01)
    assert not Change(0.5, 0.3, chunks=20).exceeds(0.01)
    diagnosis = diagnose(healthy(eta=30.0), rows(2 * 7 - 2))
    assert not {"writes-hurt", "few-tokens-hurt"} & {finding.id for finding in diagnosis.findings}
    assert all(
        "±" in f.message for f in diagnose(healthy(eta=3.0), long_rows()).findings if f.id == "writes-hurt"
    )

"""Each planted cause is named, with where it is, and nothing else severe; a healthy model has nothing severe."""

from contextlib import nullcontext

import pytest
import torch
from models import converted
from tiny import word_level

from inplace_ttt.diagnostics.diagnosis import Diagnosis, diagnose
from inplace_ttt.surgery import fast_weights

from .sick import ODD, SICK, at_the_papers_start, both_small, half_precision, healthy, long_rows, one_token_spoilt, rows, zero_in_one_chunk


def severe(diagnosis: Diagnosis) -> dict[str, set[int]]:
    """Severe causes and their layers."""
    found: dict[str, set[int]] = {}
    for finding in diagnosis.of("severe"):
        found.setdefault(finding.id, set()).update(finding.layers)
    return found


@pytest.mark.parametrize("name", SICK)
def test_the_planted_cause_is_found_and_no_other(name: str) -> None:
    sick = SICK[name]
    model = sick.model()
    with (sick.within or nullcontext)():
        diagnosis = diagnose(model, sick.batch(), learning_rates=sick.rates)
    planted = [f for f in diagnosis.findings if f.id == sick.planted]
    assert {f.severity for f in planted} == {sick.severity}, [f.message for f in diagnosis.findings]
    assert {layer for f in planted for layer in f.layers} == set(sick.layers)
    assert severe(diagnosis).keys() <= {sick.planted}, [f.message for f in diagnosis.findings]
    assert all(f.kind.remedy and f.numbers for f in planted)


def test_a_token_is_named_by_its_text_where_a_tokenizer_says_it() -> None:
    said = {}
    for tokenizer in (None, word_level(f"w{n}" for n in range(100))):
        (finding,) = (f for f in diagnose(one_token_spoilt(), long_rows(), tokenizer=tokenizer).findings if f.id == "few-tokens-hurt")
        said[finding.numbers["text"]] = finding.message
    assert said[None].endswith(f"where token {ODD} is read") and said["w4"].endswith(f"where token {ODD} ('w4') is read")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_healthy_model_has_nothing_severe(family: str, dtype: torch.dtype) -> None:
    diagnosis = diagnose(converted(family, dtype=dtype), rows())
    assert severe(diagnosis) == {}
    assert {f.id for f in diagnosis.findings if f.severity == "warning"} <= {"keys-collide", "writes-hurt"}


def test_masters_in_float32_keep_every_step() -> None:
    assert [f.id for f in diagnose(half_precision(), rows()).findings if f.id == "updates-rounded" and f.severity == "info"]
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


def test_a_loss_that_is_no_number() -> None:
    model = healthy()
    with torch.no_grad():
        fast_weights(model)[2].ttt.conv.fill_(float("nan"))
    (finding,) = diagnose(model, rows()).of("severe")
    assert finding.id == "not-finite" and "with the writes off, so they are the cause" in finding.message

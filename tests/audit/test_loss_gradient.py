"""Audits of models with `target: gradient`: no false alarm, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build
from models import RIDGE, random_ids, seven_layers
from torch import Tensor
from torch.nn.functional import pad

from inplace_ttt import InPlaceTTTConfig, calibrate, convert, gradient_reading, gradient_steps, language_head
from inplace_ttt.audit import audit_model
from inplace_ttt.audit.gradient_rule import GradientRule
from inplace_ttt.audit.probed import Stepped
from inplace_ttt.audit.probes.loss_gradient import LAW, SHARED
from inplace_ttt.gradient_reading import GradientReading
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.layer.gradient_stream import GradientStream
from inplace_ttt.layer.target import GradientTarget

Patch = pytest.MonkeyPatch
SETTINGS: dict[str, dict[str, Any]] = {
    "sum": {},
    "ridge": {"update_rule": "ridge", "ridge": 0.5, "whitening": RIDGE["whitening"]},
    "clip": {"clip": {"max_norm": 0.3}},
    "row norms": {"preserve_row_norms": True},
    "two steps": {"steps_per_chunk": 2},
}


def model(**settings: Any) -> Any:
    return seven_layers(target="gradient", chunk_size=16, eta=0.1, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.sample(1)
def test_a_sound_model_raises_no_alarm(settings: str, dtype: torch.dtype) -> None:
    report = audit_model(model(**SETTINGS[settings]).to(dtype))
    assert report.undeclared == ["chunk-size"] and report.faults == []
    assert report["target-source"].verdict == "extension"
    undecided = {id for id in (*LAW, *SHARED) if report[id].verdict == "not checked"}
    assert undecided == ({"document-grid"} if settings == "two steps" else set())


@pytest.mark.parametrize("layers", [(0, 6), (6,)], ids=str)
def test_a_relative_clip_acts_on_half_of_the_steps(layers: tuple[int, ...]) -> None:
    clipped = model(layers=layers, clip={"max_norm": 0.3, "relative": True})
    with Stepped.of(clipped, 0) as probed:
        rule = GradientRule(clipped, probed.config)
        rule.logits(probed.ids(1, 3 * probed.chunk))
        shares = [norm / float(rule.rules[index].tensors["w0"].norm()) for index, norm in rule.deltas]
    assert probed.config.clip is not None
    assert {share > probed.config.clip.max_norm for share in shares} == {True, False}


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2", "olmo2"])
@pytest.mark.full
def test_other_families_raise_no_alarm(name: str) -> None:
    converted = convert(
        build(name).eval(), InPlaceTTTConfig(layers=(0, 2), chunk_size=16, eta=0.1, target="gradient")
    )
    calibrate(converted, [random_ids(1, 64, seed=2)])
    before = {key: tensor.clone() for key, tensor in converted.state_dict().items()}
    assert audit_model(converted).faults == []
    assert all(torch.equal(tensor, before[key]) for key, tensor in converted.state_dict().items())


# Faults: how each is planted, and items of which at least one reports it.


def other_targets(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        own = GradientTarget.targets
        patch.setattr(GradientTarget, "targets", lambda self, gradient: change(own(self, gradient)))

    return plant


def predicts_the_token_itself(patch: Patch) -> None:
    def loss_gradient(lm: Any, read: Any, ids: Tensor) -> Tensor:
        return language_head.loss_gradient(lm, read, pad(ids, (1, 0))[:, :-1])

    patch.setattr(gradient_steps, "loss_gradient", loss_gradient)


def loses_single_tokens(patch: Patch) -> None:
    own = GradientStream.count

    def count(self: Any, ids: Tensor, positions: Tensor, spans: Any) -> None:
        own(self, ids if ids.shape[1] > 1 else ids * 0, positions, spans)

    patch.setattr(GradientStream, "count", count)


def keeps_rows_in_place(patch: Patch) -> None:
    patch.setattr(GradientStream, "select", lambda self, rows: None)


def packs_without_borders(patch: Patch) -> None:
    own = gradient_reading.document_spans

    def spans(mask: Any, positions: Any, lengths: Any, batch: int, tokens: int) -> Any:
        return own(mask, None, None, batch, tokens)

    patch.setattr(gradient_reading, "document_spans", spans)


def crops_nothing(patch: Patch) -> None:
    patch.setattr(GradientStream, "crop", lambda self, tokens: None)


def trains_without_targets(patch: Patch) -> None:
    own = GradientReading._targets

    def targets(self: Any, given: Any, steps: Any) -> Any:
        found = own(self, given, steps)
        return {i: v * 0 for i, v in found.items()} if self.base.training else found

    patch.setattr(GradientReading, "_targets", targets)


def rounds_the_state(patch: Patch) -> None:
    own = GradientStream.write_chunks

    def write(self: Any, rows: Any, keys: Tensor, values: Tensor, layer: Any) -> None:
        own(self, rows, keys, values, layer)
        for row in rows:
            self._state.put(row, self._state.value[row].to(torch.float8_e4m3fn).to(self._state.value.dtype))

    patch.setattr(GradientStream, "write_chunks", write)


def forgets_the_state(patch: Patch) -> None:
    own = FastWeight.write_targets

    def write(self: Any, keys: Tensor, values: Tensor, layout: Any, known: Any, **how: Any) -> Any:
        return own(self, keys, values, layout, known if known is None else known * 0.9, **how)

    patch.setattr(FastWeight, "write_targets", write)


def saves_no_open_chunk(patch: Patch) -> None:
    own = GradientStream.tensors

    def tensors(self: Any) -> Any:
        found = own(self)
        return {**found, "z": found["z"] * 0} if "z" in found else found

    patch.setattr(GradientStream, "tensors", tensors)


FAULTS: dict[str, tuple[Callable[[Patch], None], set[str]]] = {
    "the wrong sign": (other_targets(torch.neg), {"declared-rule"}),
    "half the step": (other_targets(lambda v: v / 2), {"declared-rule"}),
    "a tenth more": (other_targets(lambda v: 1.1 * v), {"declared-rule"}),
    "targets one token late": (other_targets(lambda v: pad(v, (0, 0, 1, 0))[:, :-1]), {"declared-rule"}),
    "the token itself is predicted": (predicts_the_token_itself, {"declared-rule"}),
    "nothing is written": (other_targets(torch.zeros_like), {"writes"}),
    "the state fades": (forgets_the_state, {"declared-rule"}),
    "the state is rounded": (rounds_the_state, {"declared-rule"}),
    "single tokens are lost": (loses_single_tokens, {"in-pieces"}),
    "rows stay in place": (keeps_rows_in_place, {"in-batches"}),
    "packed documents share a state": (packs_without_borders, {"document-grid"}),
    "a crop leaves its tokens": (crops_nothing, {"take-back"}),
    "training has no targets": (trains_without_targets, {"in-training", "gradient"}),
    "a saved session loses its open chunk": (saves_no_open_chunk, {"saved-session"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(1)
def test_a_fault_is_found(fault: str, monkeypatch: Patch) -> None:
    plant, owners = FAULTS[fault]
    audited = model()
    plant(monkeypatch)
    report = audit_model(audited)
    assert owners & set(report.faults), (fault, report.undeclared)
    untouched = {"slow-weights", "state-place"} & set(report.undeclared)
    assert not untouched

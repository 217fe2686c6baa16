"""Guards and monitors on small models, without a launcher."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import converted, random_ids
from torch import nn

from inplace_ttt import InPlaceTTTConfig
from inplace_ttt.diagnostics import precision
from inplace_ttt.diagnostics.observing import observed, watched
from inplace_ttt.diagnostics.writes import WriteHealth
from inplace_ttt.errors import InPlaceTTTError, NotSoError
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.data.packing import pack
from inplace_ttt.training.loop.batches import collate, where_learned
from inplace_ttt.training.loop.guards import FirstStep, GradientTap, check_state_precision, check_writes
from inplace_ttt.training.loop.monitor import EtaWarmup, LayerMonitor
from inplace_ttt.training.loop.parameters import parameter_groups, schedule
from inplace_ttt.training.loop.speed import Clock, Speed, SpeedLog
from inplace_ttt.training.recipe.data_section import Data
from inplace_ttt.training.recipe.recipe import Recipe
from inplace_ttt.training.recipe.sections import Model
from inplace_ttt.training.recipe.training_section import Training


def step(model: nn.Module, length: int = 30) -> None:
    ids = random_ids(1, length)
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def after_first_step(model: nn.Module, tap: GradientTap) -> list[str]:
    warnings: list[str] = []
    FirstStep(tap, warnings).on_step_end(None, SimpleNamespace(global_step=1), None, model=model)
    return warnings


def test_a_healthy_first_step_is_silent() -> None:
    model = converted("llama")
    tap = GradientTap(model)
    step(model)
    assert after_first_step(model, tap) == []
    assert all(norm > 0 for norms in tap.read().values() for norm in norms.values())
    assert set(tap.read()[0]) == {"conv", "proj", "weight"}


def test_rows_no_longer_than_a_chunk_are_noticed() -> None:
    model = converted("llama")
    tap = GradientTap(model)
    step(model, length=7)
    assert "conv and P got a zero gradient at the first step" in after_first_step(model, tap)[0]


def test_a_frozen_writer_is_refused() -> None:
    model = converted("llama")
    fast_weights(model)[2].ttt.proj.requires_grad_(False)
    tap = GradientTap(model)
    step(model)
    with pytest.raises(InPlaceTTTError, match="layer 2's proj got no gradient at all"):
        after_first_step(model, tap)
    fast_weights(model)[2].ttt.requires_grad_(False)
    with pytest.raises(InPlaceTTTError, match="layer 2's conv and P are frozen"):
        parameter_groups(model, Training(steps=1))


def test_a_half_precision_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("llama", torch.bfloat16)
    check_state_precision(model)
    monkeypatch.setattr(
        precision, "fast_weight", lambda *args, **kwargs: (None, torch.zeros(1, dtype=torch.bfloat16))
    )
    with pytest.raises(InPlaceTTTError, match=r"layer 0 keeps its state in torch\.bfloat16"):
        check_state_precision(model)


def test_writes_out_of_range() -> None:
    warnings: list[str] = []
    check_writes({3: WriteHealth(4, 2.0, 0.5, 0.0), 5: WriteHealth(0, 0.0, 0.0, 0.0)}, 10.0, warnings)
    assert [
        "layer 3: writes move" in warnings[0],
        "layer 5: a forward pass completed no chunk" in warnings[1],
    ] == [True, True]
    for ratio in (11.0, float("inf")):
        with pytest.raises(NotSoError, match="layer 3: the writes of one document move the weight by"):
            check_writes({3: WriteHealth(4, ratio, 0.5, 0.0)}, 10.0, warnings)


@pytest.mark.parametrize("tau", [None, 1e-3])
def test_observed_writes_are_those_of_the_law(tau: float | None) -> None:
    """η‖S‖/‖W0‖ against a sum over chunks with keys and targets taken by hooks of the test's own."""
    model = converted(
        "llama", eta=0.5, clip=None if tau is None else {"max_norm": tau, "mode": "always"}
    ).eval()
    layer = fast_weights(model)[2]
    seen: dict[str, Any] = {}
    layer.register_forward_pre_hook(lambda m, args: seen.update(z=args[0][0]))
    layer.ttt.register_forward_hook(lambda m, args, out: seen.update(v=out[0]))
    found: dict[int, WriteHealth] = {}
    with torch.no_grad(), observed(model, found):
        model(input_ids=random_ids(1, 30), use_cache=False)
    deltas = [seen["v"][i : i + 7].T @ seen["z"][i : i + 7] for i in (0, 7, 14, 21)]
    kept = [d if tau is None else d * min(1.0, tau / d.norm()) for d in deltas]
    ratio = 0.5 * sum(kept).norm() / layer.weight.norm()  # type: ignore[union-attr]
    health = found[2]
    assert (health.chunks, health.clipped) == (4, 0.0 if tau is None else 1.0)
    assert health.state_ratio == pytest.approx(ratio.item(), rel=1e-4)
    assert health.write_ratio == pytest.approx(
        0.5 * max(d.norm() for d in kept).item() / layer.weight.norm().item(), rel=1e-4
    )
    assert layer.fast.observer is None


def test_a_healthy_memory_in_half_precision_is_not_stopped() -> None:
    """KᵀK rounded to bf16 is no sum of squares: where the ridge is small it has no factor, and the monitor
    saw ratios of inf."""
    model = converted("llama", torch.bfloat16, eta=0.5, update_rule="ridge", ridge=1e-4).eval()
    ids = random_ids(1, 280) % 3
    measured: dict[int, WriteHealth] = {}
    ratios: dict[int, torch.Tensor] = {}
    with torch.no_grad(), observed(model, measured):
        model(input_ids=ids, use_cache=False)
    with torch.no_grad(), watched(model, ratios):
        model(input_ids=ids, use_cache=False)
    assert {index: float(ratio) for index, ratio in ratios.items()} == pytest.approx(
        {index: health.state_ratio for index, health in measured.items()}, rel=0.02
    )


@pytest.mark.parametrize("kept", [None, "positions", "mask", "last"])
def test_padding_is_not_measured(kept: str | None) -> None:
    """A row of which most is padding, in a forward with all labels or with those of the logits that are kept:
    its document is as alone. Callers name those by position, by a mask (ms-swift), or as the last ones."""
    model = converted("llama", eta=0.5).eval()
    ids = random_ids(1, 30)
    (row,) = pack([ids[0].tolist()], 100, 0)
    batch = collate([row])
    if kept == "last":
        batch |= {"labels": batch["labels"][:, -90:], "logits_to_keep": 90}
    elif kept is not None:
        batch = where_learned(batch)
    if kept == "mask":
        batch["logits_to_keep"] = torch.zeros(100, dtype=torch.bool).index_fill(
            0, batch["logits_to_keep"], True
        )
    with torch.no_grad():
        measured: list[Any] = []
        for given in ({"input_ids": ids, "labels": ids}, batch):
            health: dict[int, WriteHealth] = {}
            ratios: dict[int, torch.Tensor] = {}
            with observed(model, health):
                model(**given, use_cache=False)
            with watched(model, ratios):
                model(**given, use_cache=False)
            measured.append(
                (
                    [h.chunks for h in health.values()],
                    [h.state_ratio for h in health.values()],
                    [*map(float, ratios.values())],
                )
            )
    alone, padded = measured
    assert padded[0] == alone[0] == [4, 4]
    assert padded[1] == pytest.approx(alone[1], rel=1e-4) and padded[2] == pytest.approx(alone[2], rel=1e-4)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("rule", "eta", "stops"),
    [
        ({}, 0.5, False),
        ({"clip": {"max_norm": 1e-3, "mode": "always"}}, 0.5, False),
        ({"update_rule": "ridge", "ridge": 1.0}, 0.5, False),
        ({}, 1e4, True),
        ({}, float("inf"), True),
        ({"clip": {"max_norm": 10.0, "mode": "always"}}, 1e6, True),
    ],
    ids=str,
)
def test_writes_are_guarded_at_every_step(
    rule: dict[str, Any], eta: float, stops: bool, tmp_path: Path
) -> None:
    """Also where nothing is logged; from the first micro-step alone, once. What is guarded is what is
    reported at the others."""
    model = converted("llama", eta=0.5, **rule)
    for layer in fast_weights(model).values():
        layer.fast.eta = eta
    found: dict[int, WriteHealth] = {}
    with observed(model, found):
        step(model)
    monitor = LayerMonitor(GradientTap(model), [], 10.0, None)
    args, state = None, SimpleNamespace(global_step=4, logging_steps=10)
    monitor.on_step_begin(args, state, None, model=model)
    step(model)
    monitor.on_substep_end(args, state, None, model=model)
    if not stops:
        assert {index: float(ratio) for index, ratio in monitor.ratios.items()} == pytest.approx(
            {index: health.state_ratio for index, health in found.items()}, rel=1e-4
        )
    assert all(layer.fast.observer is None for layer in fast_weights(model).values())
    state.global_step = 5
    with (
        pytest.raises(NotSoError, match="the writes of one document move the weight by")
        if stops
        else contextlib.nullcontext()
    ):
        monitor.on_step_end(args, state, None, model=model)


def test_eta_rises_to_its_own_value() -> None:
    model = converted("llama", eta=(0.5, 2.0))
    warmup, seen = EtaWarmup(3), []
    for done in range(5):
        warmup.on_step_begin(None, SimpleNamespace(global_step=done), None, model=model)
        seen.append([layer.fast.eta for layer in fast_weights(model).values()])
    assert seen == [[0.125, 0.5], [0.25, 1.0], [0.375, 1.5], [0.5, 2.0], [0.5, 2.0]]


def test_groups_and_schedules() -> None:
    model = converted("llama")
    settings = Training(
        steps=10,
        learning_rate=1.0,
        conv_learning_rate=2.0,
        weight_decay=0.3,
        warmup_steps=4,
        ttt_warmup_steps=1,
        lr_scheduler="linear",
    )
    groups = {group["name"]: group for group in parameter_groups(model, settings)}
    assert {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "conv": (2.0, 0.0), "proj": (1.0, 0.0), "matrices": (1.0, 0.3), "vectors": (1.0, 0.0)
    }  # fmt: skip
    assert sum(len(g["params"]) for g in groups.values()) == len(list(model.parameters()))
    assert {id(p) for p in groups["conv"]["params"]} == {
        id(layer.ttt.conv) for layer in fast_weights(model).values()
    }
    assert [round(schedule(settings, 10, "matrices")(s), 3) for s in (0, 3, 4, 7, 10)] == [
        0.2,
        0.8,
        1.0,
        0.55,
        0.1,
    ]
    assert [round(schedule(settings, 10, "conv")(s), 3) for s in (0, 1, 10)] == [0.5, 1.0, 0.1]


def test_the_log_is_json_lines(tmp_path: Path) -> None:
    recipe = Recipe(Model(path="x"), Data(train=["x"]), Training(steps=2), "out", ttt=InPlaceTTTConfig())
    model, state, logs = (
        converted("llama"),
        SimpleNamespace(global_step=0, logging_steps=1),
        {"loss": 2.0, "grad_norm": 1.0},
    )
    speed = SpeedLog(Speed(recipe, Clock(), flops=10**12, peak=1e15))
    monitor = LayerMonitor(GradientTap(model), [], 10.0, tmp_path / "log.jsonl")
    for part in (speed, monitor):
        part.on_step_begin(None, state, None, model=model)
    step(model)
    state.global_step = 1
    for part in (speed, monitor):
        part.on_step_end(None, state, None, model=model)
    for part in (speed, monitor):
        part.on_log(None, state, None, logs=logs)
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert (
        line["step"] == 1
        and line["tokens_per_second"] > 0
        and [layer["layer"] for layer in line["layers"]] == [0, 2]
    )
    assert (
        set(line["layers"][0]["gradients"]) == {"conv", "proj", "weight"} and line["layers"][0]["chunks"] == 4
    )


def test_the_speed_is_that_of_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first, and without evaluation and saving, which are as long as many steps."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    recipe = Recipe(
        Model(path="x"),
        Data(train=["x"], sequence_length=100),
        Training(steps=5, gradient_accumulation_steps=2),
        "out",
    )
    speed = Speed(recipe, Clock(), flops=8 * 10**12, peak=1e13)
    assert speed.of_run() == {}
    for step in range(1, 6):
        now[0] += 30 if step == 1 else 2
        speed.after_step(step)
        if step == 1:
            assert speed.of_run() == {}
        with speed.clock.paused():
            now[0] += 50
    assert speed.of_run() == {
        "step_seconds": 2,
        "tokens_per_second": 100,
        "model_tflops_per_device": 4,
        "mfu": 0.4,
    }

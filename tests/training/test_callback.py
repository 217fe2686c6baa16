"""InPlaceTTTCallback in transformers' own Trainer: rates, warm-up, guards and the log, also where a run is
resumed."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LAYERS, RIDGE, converted, distance, random_ids
from safetensors.torch import load_file
from tiny import word_level
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from inplace_ttt import InPlaceTTTCallback
from inplace_ttt.errors import InPlaceTTTError, NotSoError
from inplace_ttt.surgery import fast_weights

from .forked import Forked
from .runs import environments, finish

ROWS = [{"input_ids": ids, "labels": ids} for ids in random_ids(16, 30)]


class Eta(TrainerCallback):
    """η of every step, by the step."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step + 1] = fast_weights(kwargs["model"])[0].fast.eta


def trainer(
    folder: Path, model: nn.Module | None = None, rows: Any = ROWS, tokenizer: Any = None, **arguments: Any
) -> Trainer:
    defaults = {
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "weight_decay": 0.1,
    }
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        gradient_accumulation_steps=2,
        disable_tqdm=True,
        **{**defaults, **arguments},
    )
    return Trainer(model or converted("llama", eta=0.5), args, train_dataset=rows, processing_class=tokenizer)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_conv_and_p_have_groups_of_their_own(tmp_path: Path) -> None:
    run = trainer(tmp_path, lr_scheduler_type="constant")
    callback = InPlaceTTTCallback(conv_learning_rate=1e-2, proj_weight_decay=0.3).attach(run)
    run.train()
    groups = {group["name"]: group for group in run.optimizer.param_groups}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "decaying": (1e-3, 0.1), "rest": (1e-3, 0.0), "conv": (1e-2, 0.0), "proj": (1e-3, 0.3)
    }  # fmt: skip
    assert {id(p) for p in groups["conv"]["params"]} == {
        id(layer.ttt.conv) for layer in fast_weights(run.model).values()
    }
    assert sum(len(group["params"]) for group in groups.values()) == len(list(run.model.parameters()))
    assert callback.warnings == [] and run.state.log_history[0]["learning_rate"] == 1e-3


def test_a_gate_of_writes_learns_at_the_rate_of_p_or_its_own(tmp_path: Path) -> None:
    run = trainer(tmp_path, converted("llama", **RIDGE))
    for callback, rate in (
        (InPlaceTTTCallback(proj_learning_rate=1e-2), 1e-2),
        (InPlaceTTTCallback(proj_learning_rate=1e-2, gate_learning_rate=3e-2), 3e-2),
    ):
        groups = {group["name"]: group for group in callback.groups(run.model, run)}
        assert (groups["proj"]["lr"], groups["gate"]["lr"]) == (1e-2, rate)
        assert len(groups["gate"]["params"]) == len(LAYERS)


def test_the_optimizer_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """By `args.optim` or by its class; one that chooses its parameters itself is refused."""
    run = trainer(tmp_path, optim="adafactor")
    InPlaceTTTCallback(conv_learning_rate=1e-2).attach(run)
    assert (
        type(run.create_optimizer()).__name__ == "Adafactor" and run.optimizer.param_groups[2]["lr"] == 1e-2
    )
    run = Trainer(
        converted("llama"),
        trainer(tmp_path).args,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    )
    InPlaceTTTCallback(conv_learning_rate=1e-2).attach(run)
    rates = [(group["name"], group["lr"], group["momentum"]) for group in run.create_optimizer().param_groups]
    assert rates == [("decaying", 0.5, 0.9), ("rest", 0.5, 0.9), ("conv", 1e-2, 0.9), ("proj", 0.5, 0.9)]
    run.optimizer, run.optimizer_cls_and_kwargs = (
        None,
        (torch.optim.SGD, {"params": list(run.model.parameters())}),
    )
    InPlaceTTTCallback().attach(run)
    with pytest.raises(InPlaceTTTError, match="chooses its parameters itself"):
        run.create_optimizer()


@pytest.mark.parametrize(("begins", "of_rows", "odd"), [(0, 0, 0), (1, 0, 8), (1, 6, 2), (1, 8, 0)])
@pytest.mark.sample(1)
def test_rows_that_do_not_begin_as_texts_do_are_said(
    begins: int, of_rows: int, odd: int, tmp_path: Path
) -> None:
    """Padding on the left is no beginning; where the tokenizer has none, nothing is."""
    tokenizer = word_level((f"w{i}" for i in range(94)), begins)
    start = torch.tensor([tokenizer.pad_token_id, tokenizer.eos_token_id])
    rows = [
        {name: torch.cat([start, ids[2:]]) if i < of_rows else ids for name, ids in row.items()}
        for i, row in enumerate(ROWS)
    ]
    run = trainer(tmp_path, rows=rows, tokenizer=tokenizer, max_steps=1)
    callback = InPlaceTTTCallback().attach(run)
    run.train()
    said = [warning for warning in callback.warnings if "do not begin with '<eos>'" in warning]
    assert [warning.split(" rows")[0] for warning in said] == ([f"{odd} of the first 8"] if odd else [])


def test_the_log_has_every_layer(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.add_callback(InPlaceTTTCallback())
    run.train()
    found = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert [layer["layer"] for layer in found[-1]["layers"]] == [0, 2]
    assert all(layer["chunks"] == 4 and layer["gradients"]["conv"] > 0 for layer in found[-1]["layers"])


SIZES = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
STAGES = ({"stage": 2}, {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True})


@pytest.mark.parametrize(
    "arguments",
    [{}, *({"deepspeed": {"zero_optimization": s, **SIZES}} for s in STAGES)],
    ids=["DDP", "ZeRO-2", "ZeRO-3"],
)
@pytest.mark.sample(1)
def test_two_processes_train_as_one(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The same 16 rows a step: losses, rates and layers of the log, which one process writes, and the
    weights."""
    one_of_several(tmp_path / "one", {})
    processes = Forked(
        functools.partial(one_of_several, tmp_path / "two", {"per_device_train_batch_size": 4, **arguments}),
        environments(2),
    )
    finish(processes)
    one, two = ([line for line in lines(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert [line["step"] for line in two] == [1, 2, 3, 4]
    for line, other in zip(one, two, strict=True):
        assert (
            other["loss"] == pytest.approx(line["loss"], rel=1e-5)
            and other["learning_rate"] == line["learning_rate"]
        )
        assert [layer["layer"] for layer in other["layers"]] == [0, 2]
    first, second = (
        load_file(tmp_path / name / "checkpoint-4" / "model.safetensors") for name in ("one", "two")
    )
    assert first.keys() == second.keys() and max(distance(second[name], first[name]) for name in first) < 1e-3


def one_of_several(folder: Path, arguments: dict[str, Any]) -> None:
    # before the arguments, under whose ZeRO-3 its weights would be built in shards
    model = converted("llama", eta=0.5)
    run = trainer(folder, model, **arguments)
    InPlaceTTTCallback(conv_learning_rate=1e-2, eta_warmup_steps=3).attach(run)
    run.train()


@pytest.mark.full
def test_a_resumed_run_goes_on_in_the_warm_up(tmp_path: Path) -> None:
    """And ends with the weights of one that was not stopped; what is saved on the way is η's own value."""
    whole, first, second = Eta(), Eta(), Eta()
    settings: dict[str, Any] = {"eta_warmup_steps": 3, "conv_learning_rate": 1e-2}
    for folder, observer, stop in (("whole", whole, None), ("halves", first, 2), ("halves", second, None)):
        run = trainer(tmp_path / folder)
        run.add_callback(observer)
        InPlaceTTTCallback(**settings).attach(run)
        if stop:
            run.add_callback(StopAt(stop))
        run.train(resume_from_checkpoint=observer is second)
        assert [layer.fast.eta for layer in fast_weights(run.model).values()] == [0.5, 0.5]
        if observer is whole:
            expected = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert whole.seen == {1: 0.125, 2: 0.25, 3: 0.375, 4: 0.5}
    assert (first.seen, second.seen) == ({1: 0.125, 2: 0.25}, {3: 0.375, 4: 0.5})
    for name, parameter in run.model.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-6), name
    assert [line["step"] for line in lines(tmp_path / "halves") if "loss" in line] == [1, 2, 3, 4]
    saved = json.loads((tmp_path / "whole" / "checkpoint-2" / "config.json").read_text())
    assert saved["inplace_ttt"]["config"]["eta"] == 0.5


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("length", [30, 5], ids=["rows of chunks", "rows shorter than a chunk"])
@pytest.mark.sample(1)
def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, length: int) -> None:
    """Where the writer reads it, before any weight has changed; and nothing of the callback stays with the
    model."""
    rows = [{"input_ids": ids, "labels": ids} for ids in random_ids(16, length)]
    run = trainer(tmp_path, rows=rows, max_steps=20)
    callback = InPlaceTTTCallback(eta_warmup_steps=10).attach(run)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.model.register_forward_hook(broken_from(7))
    with pytest.raises(NotSoError, match="is not finite at step 4; continue from the checkpoint before it"):
        run.train()
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    layer = fast_weights(run.model)[0]
    assert layer.fast.eta == 0.5 and layer.fast.observer is None and not layer.ttt.conv._backward_hooks
    assert bool(callback.warnings) == (length < 7)


def broken_from(forward: int) -> Callable[..., Any]:
    seen = [0]

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        seen[0] += 1
        if seen[0] >= forward:
            output.loss = output.loss * float("nan")
        return output

    return hook


def test_writes_that_are_too_large_stop_the_run(tmp_path: Path) -> None:
    run = trainer(tmp_path, logging_steps=10)
    run.add_callback(InPlaceTTTCallback(stop_write_ratio=1e-6))
    with pytest.raises(NotSoError, match=r"above the limit of 1e-06 \(stop_write_ratio\)"):
        run.train()


def test_a_setting_without_effect_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.add_callback(InPlaceTTTCallback(proj_learning_rate=1e-2))
    with pytest.raises(
        InPlaceTTTError, match=r"proj_learning_rate does nothing.*call attach\(trainer\) before train"
    ):
        run.train()
    run = trainer(tmp_path)
    run.add_callback(InPlaceTTTCallback(eta_warmup_steps=4))
    with pytest.raises(InPlaceTTTError, match="eta_warmup_steps is 4 and the run has 4 steps"):
        run.train()
    run = trainer(tmp_path, converted("llama", conv="next"))
    InPlaceTTTCallback(conv_weight_decay=0.1).attach(run)
    with pytest.raises(InPlaceTTTError, match="conv_weight_decay does nothing"):
        run.train()


def test_what_cannot_be_attached_to_is_refused(tmp_path: Path) -> None:
    model = converted("llama")
    with pytest.raises(InPlaceTTTError, match="is not converted"):
        InPlaceTTTCallback().attach(trainer(tmp_path, nn.Linear(2, 2)))
    given = Trainer(
        model, trainer(tmp_path).args, optimizers=(torch.optim.SGD(model.parameters(), 1e-3), None)
    )
    with pytest.raises(InPlaceTTTError, match="the trainer was given an optimizer"):
        InPlaceTTTCallback().attach(given)
    run = trainer(tmp_path)
    InPlaceTTTCallback().attach(run)
    with pytest.raises(InPlaceTTTError, match="the trainer was given an optimizer"):
        InPlaceTTTCallback().attach(run)
    for layer in fast_weights(model).values():
        layer.ttt.requires_grad_(False)
    with pytest.raises(InPlaceTTTError, match="conv and P are frozen"):
        InPlaceTTTCallback().attach(trainer(tmp_path, model))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"conv_learning_rate": 0}, "conv_learning_rate must be a number above 0, got 0"),
        ({"proj_learning_rate": "1e-3"}, "proj_learning_rate must be a number above 0, got '1e-3'"),
        ({"proj_weight_decay": -1}, "proj_weight_decay must be a number of at least 0"),
        ({"conv_weight_decay": float("nan")}, "conv_weight_decay must be a number of at least 0"),
        ({"eta_warmup_steps": 1.5}, "eta_warmup_steps must be a whole number of at least 0, got 1.5"),
        ({"stop_write_ratio": 0}, "stop_write_ratio must be a number above 0, got 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(InPlaceTTTError, match=message):
        InPlaceTTTCallback(**setting)

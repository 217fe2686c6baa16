"""Distillation: the model learns from its own answers with full attention and without writes."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import RIDGE, converted, random_ids
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import kl_div

from inplace_ttt import InPlaceTTTError, revert
from inplace_ttt.attention_window import set_attention_window
from inplace_ttt.surgery import disable_ttt
from inplace_ttt.tasks import IGNORED
from inplace_ttt.training.loop.distillation import teacher_logits
from inplace_ttt.training.recipe.recipe import load_recipe

from .runs import checkpoint, logged, trained
from .split_runs import SPLITS, agree, plain_run, splittable

WEIGHT, TEMPERATURE = 0.7, 2.0
SETTING = f"training.distillation={{weight: {WEIGHT}, temperature: {TEMPERATURE}}}"
WINDOW = "model.window={size: 12, sinks: 2}"
MODELS: dict[str, dict[str, Any]] = {
    "paper": {}, "ridge": RIDGE, "loss gradients": {"target": "gradient", "eta": 0.3}
}  # fmt: skip


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss, with a copy of the model as its teacher: without fast weights, with full attention."""
    teacher = revert(copy.deepcopy(model)).eval()
    teacher.set_attn_implementation("sdpa")
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        wanted = teacher(**given, use_cache=False).logits[:, :-1]
    found = model(**given, use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    chosen = labels != IGNORED
    own = found[chosen].log_softmax(-1).gather(1, labels[chosen][:, None]).mean()
    soft = kl_div(
        (found[chosen] / TEMPERATURE).log_softmax(-1),
        (wanted[chosen] / TEMPERATURE).softmax(-1),
        reduction="batchmean",
    )
    return -(1 - WEIGHT) * own + WEIGHT * TEMPERATURE**2 * soft


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splittable(tmp_path_factory.mktemp("distillation"))


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("paper", "two micro-steps"),
        ("paper", "two processes, ZeRO 3"),
        ("ridge", "two processes, ZeRO 2, recomputed"),
        ("ridge", "two ranks share rows"),
        ("loss gradients", "two processes, ZeRO 1"),
    ],
)
def test_every_split_is_the_same_run(model: str, split: str, recipe: Path, tmp_path: Path) -> None:
    shared = "share" in split
    settings = (SETTING, f"model.path={checkpoint(tmp_path / 'model', MODELS[model])}")
    settings = settings if shared else (*settings, WINDOW)
    plain = plain_run(load_recipe(recipe, settings), loss_of)
    agree(recipe, plain, tmp_path / "out", (*settings, *SPLITS[split]))


def test_the_teacher_sees_the_whole_row_and_the_model_is_as_before() -> None:
    model, ids = converted("llama", eta=0.5).train(), random_ids(2, 40)
    expected = revert(copy.deepcopy(model)).eval()(input_ids=ids, use_cache=False).logits[:, 3:9]
    set_attention_window(model, 8, 2)
    before = model.config._attn_implementation
    batch = {
        "input_ids": ids,
        "labels": ids[:, 3:9],
        "logits_to_keep": torch.arange(3, 9),
        "use_cache": False,
    }
    found = teacher_logits(model, batch, "sdpa")
    assert torch.equal(found, expected) and not found.requires_grad
    assert model.config._attn_implementation == before and all(m.training for m in model.modules())
    assert not torch.allclose(model(input_ids=ids, use_cache=False).logits[:, 3:9], expected)


def test_the_teacher_has_the_adapters_without_their_dropout() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model, ids = get_peft_model(converted("llama", eta=0.5), adapter).eval(), random_ids(2, 40)
    with torch.no_grad(), disable_ttt(model):
        expected = model(input_ids=ids, use_cache=False).logits
    found = teacher_logits(model.train(), {"input_ids": ids, "use_cache": False}, "sdpa")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("trainable", ["ttt", "lora"])
def test_a_frozen_base_learns_from_it(trainable: str, recipe: Path, tmp_path: Path) -> None:
    settings = (f"training.trainable={trainable}", WINDOW, "training.steps=2", "monitor.eval_steps=0")
    losses = []
    for name, added in (("labels", ()), ("both", (SETTING,))):
        trained(recipe, f"output={tmp_path / name}", *settings, *added)
        losses.append(logged(tmp_path / name, "loss"))
    assert all(map(math.isfinite, losses[1])) and losses[0] != losses[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.distillation={weight: 0}"], "weight: must be above 0"),
        (["training.distillation={weight: 1.5}"], "weight: must be above 0 and at most 1"),
        (["training.distillation={temperature: 0}"], "temperature: must be above 0"),
        ([SETTING, "training.liger=true"], "needs all logits"),
    ],
)
def test_settings_that_are_refused(settings: list[str], message: str, recipe: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=message):
        load_recipe(recipe, settings)

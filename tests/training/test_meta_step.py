"""What a step on the meta device finds: bytes as a process really takes them, products as counted by hand."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt import InPlaceTTTConfig, convert, revert
from inplace_ttt.training.model import meta_model
from inplace_ttt.training.plan.device_memory import ModelSize, single_process_memory
from inplace_ttt.training.plan.flops import (
    attention_flops,
    attention_of_targets,
    fast_weight_flops,
    model_flops,
)
from inplace_ttt.training.plan.meta_step import evaluation_cost, step_cost
from inplace_ttt.training.recipe.recipe import Recipe
from inplace_ttt.training.recipe.training_section import Distillation

from . import measured_step
from .forked import Forked
from .recipes import EXPERTS, small_recipe


def size_of(recipe: Recipe) -> ModelSize:
    model = meta_model(recipe)
    sizes = [p.numel() for p in model.parameters()]
    return ModelSize(sum(sizes), sum(sizes), max(sizes), 0, 256, 4, 256, 128, (4 * 256 * 1024,) * 2)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak memory of a process is read from Linux's /proc",
)
@pytest.mark.parametrize(
    ("dtype", "checkpointing", "vocabulary", "config"),
    [
        ("float32", False, 4096, {}),
        ("float32", True, 32000, {}),
        ("bfloat16", False, 12000, {}),
        ("bfloat16", True, 4096, {}),
        ("bfloat16", False, 4096, {}),
        ("float32", False, 4096, EXPERTS),
    ],
    ids=lambda value: (
        {False: "kept", True: "recomputed"}[value] if isinstance(value, bool) else str(value or "dense")[:30]
    ),
)
@pytest.mark.full
def test_measured_peak_memory(
    dtype: str, checkpointing: bool, vocabulary: int, config: dict[str, Any], tmp_path: Path
) -> None:
    """Within 15 % of what a process really takes for the model, AdamW and a step, and for reading held-out
    rows after it."""
    recipe = small_recipe(tmp_path, dtype, checkpointing, vocabulary, **config)
    code, log = Forked(functools.partial(measured_step.main, str(recipe.path)), [{}]).wait()
    assert code == 0, log[-3000:]
    measured = dict(zip(("step", "evaluation"), map(int, log.split("PEAKS ")[1].split()[:2]), strict=True))
    size = 4 if dtype == "float32" else 2
    memory = single_process_memory(size_of(recipe), step_cost(recipe), size, evaluation_cost(recipe))
    planned = {"step": memory.total, "evaluation": memory.evaluation}
    for name, bytes in planned.items():
        print(
            f"{name}: planned {bytes / 1e6:.0f} MB, measured {measured[name] / 1e6:.0f} MB, "
            f"{bytes / measured[name]:.3f}"
        )
    assert {name: planned[name] / measured[name] for name in planned} == pytest.approx(
        {"step": 1, "evaluation": 1}, abs=0.15
    )


def test_a_step_recomputed_holds_less_and_computes_more(tmp_path: Path) -> None:
    kept, recomputed = (
        step_cost(small_recipe(tmp_path, "float32", checkpointing)) for checkpointing in (False, True)
    )
    assert recomputed.activations < 0.6 * kept.activations
    assert 1.2 < recomputed.product_flops / kept.product_flops < 1.4


def test_a_steps_products_by_hand(tmp_path: Path) -> None:
    """6 operations a token and weight, except that the first layer's input needs no gradient: the embedding
    is a look-up."""
    recipe = small_recipe(tmp_path, "float32", False)
    d, h, kv, tokens = 256, 1024, 128, 1024
    weights = 4 * (2 * d * d + 2 * d * kv + 3 * d * h) + 4096 * d
    plain = 6 * tokens * weights
    ttt = fast_weight_flops(recipe, meta_model(recipe), 0)
    assert step_cost(recipe).product_flops == pytest.approx(plain + ttt, rel=0.03)


@pytest.mark.parametrize("config", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("train", ["all", "ttt", "lora"])
def test_what_a_model_needs_is_what_a_step_without_recomputation_takes(
    train: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever is trained; and it stays that where a step recomputes."""
    recipe = small_recipe(tmp_path, "bfloat16", False, **config)
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, trainable=train))
    model = meta_model(recipe)
    needed = model_flops(recipe, model)
    assert needed == pytest.approx(
        step_cost(recipe).product_flops + attention_flops(recipe, model.config, 3), rel=0.03
    )
    again = dataclasses.replace(
        recipe, training=dataclasses.replace(recipe.training, gradient_checkpointing=True)
    )
    assert model_flops(again, model) == needed


@pytest.mark.parametrize("train", ["all", "lora"])
def test_a_teacher_takes_one_more_forward_and_its_logits(train: str, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "bfloat16", False)
    alone, taught = (
        dataclasses.replace(
            recipe, training=dataclasses.replace(recipe.training, trainable=train, distillation=distillation)
        )
        for distillation in (None, Distillation())
    )
    model = meta_model(taught)
    costs = step_cost(alone), step_cost(taught)
    assert model_flops(taught, model) == pytest.approx(
        costs[1].product_flops + attention_flops(taught, model.config, 4), rel=0.03
    )
    forward = model_flops(taught, model) - model_flops(alone, model)
    assert 0.25 < forward / model_flops(alone, model) < 0.5
    tokens, vocabulary = 1024, 4096
    # the teacher's logits in bfloat16, and both distributions in float32, at least
    assert costs[1].logits - costs[0].logits >= tokens * vocabulary * 2


def planned(recipe: Recipe, surgery: InPlaceTTTConfig, folder: Path) -> Recipe:
    """The recipe of a model that was measured at a conversion, of which a plan reads the config."""
    base = revert(
        meta_model(dataclasses.replace(recipe, ttt=InPlaceTTTConfig(layers=surgery.layers, chunk_size=32)))
    )
    convert(base, surgery).config.save_pretrained(folder)
    return dataclasses.replace(
        recipe, model=dataclasses.replace(recipe.model, path=str(folder), config=None), ttt=None
    )


def test_finding_loss_gradients_is_counted(tmp_path: Path) -> None:
    surgery = InPlaceTTTConfig(layers=(1, 3), chunk_size=128, target="gradient")
    recipe = planned(small_recipe(tmp_path, "bfloat16", False), surgery, tmp_path / "converted")
    model = meta_model(recipe)
    attention = attention_flops(recipe, model.config, 3) + attention_of_targets(recipe, model)
    assert model_flops(recipe, model) == pytest.approx(step_cost(recipe).product_flops + attention, rel=0.04)
    without = dataclasses.replace(
        recipe, model=small_recipe(tmp_path, "bfloat16", False).model, ttt=InPlaceTTTConfig(layers=(1, 3))
    )
    assert 1.4 < model_flops(recipe, model) / model_flops(without, meta_model(without)) < 1.8, (
        "a third forward, and a half backward"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"update_rule": "ridge", "ridge": 1.0, "whitening": {"rank": 0.5}}],
    ids=["paper", "least squares"],
)
@pytest.mark.sample(2)
def test_what_a_fast_weight_adds_to_the_products(
    options: dict[str, Any], dtype: str, checkpointing: bool, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, dtype, checkpointing)
    recipes = []
    for layers in ((1,), (1, 2)):
        surgery = InPlaceTTTConfig(layers=layers, chunk_size=32, **options)
        measured = surgery.needs_calibration
        recipes.append(
            planned(recipe, surgery, tmp_path / str(len(layers)))
            if measured
            else dataclasses.replace(recipe, ttt=surgery)
        )
    one, two = map(step_cost, recipes)
    expected = fast_weight_flops(recipes[0], meta_model(recipes[0]), int(checkpointing))
    assert two.product_flops - one.product_flops == pytest.approx(expected, rel=0.05)


def test_logits_dominate_unless_they_are_fused(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "bfloat16", True, vocabulary=32000)
    plain = step_cost(recipe)
    assert plain.logits > 0.8 * plain.activations
    fused = step_cost(dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, liger=True)))
    assert fused.logits == 0 and fused.activations < 0.2 * plain.activations


def test_sdpa_keeps_masks_and_repeated_heads_that_flash_attention_does_not(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, "bfloat16", False)
    by_name = {
        name: step_cost(
            dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, attn_implementation=name))
        ).activations
        for name in ("sdpa", "flash_attention_2", "eager")
    }
    masks = 1024 * 1024 * (1 + 4 * 2)  # the booleans, and numbers of them in each layer
    assert by_name["sdpa"] - by_name["flash_attention_2"] == pytest.approx(
        masks + 4 * 2 * 1024 * 128 * 2, rel=0.05
    )
    assert by_name["eager"] > by_name["sdpa"]


def test_gradients_count_into_a_step(tmp_path: Path) -> None:
    """With many weights and few tokens they are what a step holds at its end."""
    recipe = small_recipe(tmp_path, "float32", True, length=256)
    step = step_cost(recipe)
    assert step.step >= 4 * size_of(recipe).trained > step.activations

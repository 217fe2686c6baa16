"""The recipe reader: values by type, and every mistake answered with its line and key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from inplace_ttt import InPlaceTTTConfig, UpdateClip
from inplace_ttt.training.recipe.recipe import load_recipe

from .recipe_texts import RECIPE, changed, load
from .recipes import tiny_recipe, write_recipe


def test_the_plain_recipe(tmp_path: Path) -> None:
    recipe = load(tmp_path, RECIPE)
    assert (recipe.model.path, recipe.data.train, recipe.training.steps) == ("somewhere", ["book.txt"], 3)
    assert recipe.path == tmp_path / "recipe.yaml"
    again = yaml.safe_dump(recipe.to_dict())
    assert load(tmp_path, again) == recipe, "every default written out gives the same recipe"


@pytest.mark.parametrize("spelled", ["1e-5", "1.0e-5", "1E-05", "0.00001", "+1e-5"])
def test_numbers_as_people_spell_them(spelled: str, tmp_path: Path) -> None:
    recipe = load(tmp_path, changed("  steps: 3", f"  steps: 1e3\n  learning_rate: {spelled}"))
    assert (recipe.training.learning_rate, recipe.training.steps) == (1e-5, 1000)
    assert load(tmp_path, RECIPE, f"training.learning_rate={spelled}").training.learning_rate == 1e-5
    assert load(tmp_path, changed("  steps: 3", "  tokens: 20_000_000_000")).training.tokens == 20_000_000_000


@pytest.mark.parametrize(("spelled", "steps"), [("010", 10), ("+0_10", 10), ("08", 8), ("0x10", 16)])
def test_leading_zeros_mean_nothing(spelled: str, steps: int, tmp_path: Path) -> None:
    assert load(tmp_path, changed("  steps: 3", f"  steps: {spelled}")).training.steps == steps
    assert load(tmp_path, RECIPE, f"training.steps={spelled}").training.steps == steps


def test_names_stay_names(tmp_path: Path) -> None:
    for spelled, name in (("7b-model", "7b-model"), ("'1e5'", "1e5"), ('"7"', "7"), (".cache/m", ".cache/m")):
        assert load(tmp_path, changed("path: somewhere", f"path: {spelled}")).model.path == name


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("training.steps=7", "training", "steps", 7),
        ("training.betas=[0.8, 0.9]", "training", "betas", [0.8, 0.9]),
        ("training.liger=true", "training", "liger", True),
        ("data.train=[a.txt, b.txt]", "data", "train", ["a.txt", "b.txt"]),
        ("data.cache=null", "data", "cache", None),
        ("parallel.nproc_per_node=4", "parallel", "nproc_per_node", 4),
        (
            "model.overrides.rope_parameters.factor=2.0",
            "model",
            "overrides",
            {"rope_parameters": {"factor": 2.0}},
        ),
    ],
)
def test_overrides(override: str, section: str, name: str, value: Any, tmp_path: Path) -> None:
    assert getattr(getattr(load(tmp_path, RECIPE, override), section), name) == value


def test_the_later_override_wins_and_surgery_can_be_removed(tmp_path: Path) -> None:
    assert load(tmp_path, RECIPE, "training.steps=4", "training.steps=5").training.steps == 5
    assert load(tmp_path, RECIPE, "ttt=null").ttt is None


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("chunk_size: 16", InPlaceTTTConfig(chunk_size=16)),
        ("preset: reference", InPlaceTTTConfig.preset("reference")),
        ("preset: reference\n  eta: 2", InPlaceTTTConfig.preset("reference", eta=2.0)),
        ("layers: [0, 2]\n  eta: [1, 0.5]", InPlaceTTTConfig(layers=(0, 2), eta=(1.0, 0.5))),
        (
            "layers: every:3\n  clip: {max_norm: 1e-3, relative: true}",
            InPlaceTTTConfig(layers="every:3", clip=UpdateClip(1e-3, relative=True)),
        ),
        ("preset: ridge\n  whitening: {rank: 8}", InPlaceTTTConfig.preset("ridge", whitening={"rank": 8})),
        ("preset: ridge\n  whitening: null", InPlaceTTTConfig.preset("ridge", whitening=None)),
    ],
)
def test_surgery_is_a_config_with_a_preset_for_the_rest(
    section: str, expected: InPlaceTTTConfig, tmp_path: Path
) -> None:
    recipe = load(tmp_path, changed("chunk_size: 16", section))
    assert recipe.ttt == expected
    assert load(tmp_path, yaml.safe_dump(recipe.to_dict())) == recipe


def test_steps_follow_from_tokens(tmp_path: Path) -> None:
    parallel = {"nproc_per_node": 4, "sequence_parallel_size": 2}
    recipe = tiny_recipe(
        tmp_path,
        parallel=parallel,
        training={"tokens": 1000, "batch_size": 2, "gradient_accumulation_steps": 3},
        monitor={"save_steps": 2},
    )
    assert recipe.rows_per_step == 2 * 3 * 4 // 2
    assert recipe.steps == 2  # 768 tokens a step
    assert recipe.parallel.world == 4


def test_deepspeed_settings_come_as_a_stage_a_file_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    for given, stage in ((2, 2), ("ds.json", 3), ({"zero_optimization": {"stage": 1}}, 1), ({}, 0)):
        assert tiny_recipe(tmp_path, deepspeed=given).zero_stage == stage


def test_the_test_recipe_is_one(tmp_path: Path) -> None:
    assert load_recipe(write_recipe(tmp_path)).ttt == InPlaceTTTConfig(layers=(0, 2), chunk_size=16)

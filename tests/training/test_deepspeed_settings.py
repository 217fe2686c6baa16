"""What a recipe hands to DeepSpeed: refused where the recipe says it itself, or DeepSpeed would not take
it."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt import InPlaceTTTError
from inplace_ttt.training.loop.arguments import deepspeed_config
from inplace_ttt.training.recipe import recipe as recipes
from inplace_ttt.training.recipe.deepspeed import KNOWN, without_effect

from .recipes import tiny_recipe

ZERO = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": {"type": "AdamW"}}, "optimizer would replace the recipe's settings under training"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler would replace the recipe's settings under training"),
        (
            {"gradient_clipping": 7},
            "gradient_clipping is 7, but training.max_grad_norm sets it to 1.0; leave it out",
        ),
        (
            {"gradient_accumulation_steps": 9},
            "gradient_accumulation_steps is 9, but training.gradient_accumulation_steps sets it to 1",
        ),
        (
            {"train_batch_size": True},
            "train_batch_size is True, but batch_size x gradient_accumulation_steps x processes sets it to 1",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, but model.dtype sets it to False"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is True, but model.dtype sets it to False"),
        ({"bf16": 1}, "bf16 must be a table, got 1"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
            "offload_optimizer must be a table, got 'cpu'",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf17"}},
            "DeepSpeed refuses it: 'bf17' is not a valid DtypeEnum",
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "many"}},
            "reduce_bucket_size: Input should be a valid integer",
        ),
        (
            {"zero_optimization": {"stage": 2, "bogus": 3}},
            "DeepSpeed refuses it: bogus: Extra inputs are not permitted, got 3",
        ),
        ({"communication_data_type": "x"}, "DeepSpeed refuses it: Invalid communication_data_type"),
        ({"compile": 3}, "DeepSpeed refuses it: TypeError"),
    ],
)
def test_conflicts_are_refused_with_the_recipe(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**ZERO, **settings}))
    for given in ({**ZERO, **settings}, "ds.json"):
        with pytest.raises(InPlaceTTTError) as refusal:
            tiny_recipe(tmp_path, deepspeed=given)
        assert (
            says in str(refusal.value)
            and ", deepspeed: " in str(refusal.value)
            and "\n" not in str(refusal.value)
        )


def test_what_the_recipe_says_too_passes(tmp_path: Path) -> None:
    same = {
        "gradient_clipping": 1,
        "train_batch_size": 1,
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": False},
    }
    recipe = tiny_recipe(
        tmp_path, deepspeed={**ZERO, **same, "bf16": {"bf16_master_weights_and_grads": False}}
    )
    assert deepspeed_config(recipe)["bf16"] == {"bf16_master_weights_and_grads": False, "enabled": "auto"}
    assert without_effect(recipe.deepspeed_settings) == []
    assert not logging.root.manager.disable


def test_unknown_settings_are_warned_of(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, deepspeed={**ZERO, "bogus_key": 3, "offload_optimizer": {"device": "cpu"}})
    assert [warning.split()[0] for warning in without_effect(recipe.deepspeed_settings)] == [
        "deepspeed.bogus_key",
        "deepspeed.offload_optimizer",
    ]


def test_every_key_that_deepspeed_reads_is_known() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    read: set[str] = set()

    class Names:
        def __contains__(self, name: str) -> bool:
            read.add(name)
            return name in settings

        def __iter__(self) -> Iterator[str]:
            return iter(dict(settings))

    class Settings(dict):
        def __contains__(self, name: object) -> bool:
            read.add(str(name))
            return super().__contains__(name)

        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

        def keys(self) -> Any:
            return Names()

    settings = Settings({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1})
    DeepSpeedConfig(settings)
    # the old name of bf16, which is read without that alone
    assert len(read) > 40 and read - KNOWN == {"bfloat16"}


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer asks at every micro-step."""
    (tmp_path / "ds.json").write_text(json.dumps(ZERO))
    reads: list[bytes] = []
    parse = recipes.parse_json
    monkeypatch.setattr(recipes, "parse_json", lambda text: reads.append(text) or parse(text))
    recipe = tiny_recipe(tmp_path, deepspeed="ds.json")
    assert (
        recipe.zero_stage == 2
        and deepspeed_config(recipe)["zero_optimization"]["stage"] == 2
        and len(reads) == 1
    )

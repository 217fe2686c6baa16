"""A vision-language checkpoint, trained from disk on text."""

from pathlib import Path

import pytest
from models import logits, random_ids
from tiny import word_level
from transformers import AutoModelForImageTextToText
from vision_language import TEXT, build

from inplace_ttt import load
from inplace_ttt.surgery import fast_weights

from .runs import CHUNK, documents, recipe_file, trained


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Gemma3", "Llava", "Mistral3", "Qwen2_5_VL", "Qwen3VL"])
def test_it_trains_and_keeps_its_vision_tower(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build(name).save_pretrained(base)
    word_level(f"t{i}" for i in range(3, TEXT["vocab_size"])).save_pretrained(base)
    surgery = {"layers": [0, 2], "chunk_size": CHUNK}
    report, _ = trained(recipe_file(tmp_path, base, documents(tmp_path / "text"), ttt=surgery))
    model = load(tmp_path / "out" / "final")
    assert report["steps"] == 3 and all(layer.ttt.conv.any() for layer in fast_weights(model).values())
    untrained = AutoModelForImageTextToText.from_pretrained(base)
    given, tower = dict(untrained.named_parameters()), [n for n, _ in model.named_parameters() if "vis" in n]
    assert tower and all(
        given[parameter].shape == model.get_parameter(parameter).shape for parameter in tower
    )
    assert logits(model, random_ids(1, 40)).isfinite().all()

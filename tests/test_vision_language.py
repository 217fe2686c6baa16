"""The text tower of vision-language models: converted, and nothing else; images in the text; how it is saved
and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import CHUNK, distance, random_ids, turn_writer_on
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, PreTrainedModel
from vision_language import CONFIGS, TEXT, VISION, build

import inplace_ttt
from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.layer.fast_linear import FastWeight
from inplace_ttt.surgery import is_converted

IMAGES: dict[str, dict[str, Tensor]] = {
    **{
        key: {
            "pixel_values": torch.linspace(-1, 1, 16 * 96).view(16, 96),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }
        for key in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
    },
    **{
        key: {"pixel_values": torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28)}
        for key in ("Gemma3", "Llava")
    },
}
"""One image, which is four tokens."""

LENGTH = 4 * CHUNK + 3


def converted(name: str, target: str = "embeddings") -> PreTrainedModel:
    model = convert(build(name), InPlaceTTTConfig(layers=(0, 2), chunk_size=CHUNK, target=target))
    turn_writer_on(model)
    return model


def logits(model: PreTrainedModel, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(use_cache=False, **given).logits


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sample(4)
def test_the_text_tower_is_converted_and_generates_what_it_reads(
    name: str, target: str, tmp_path: Path
) -> None:
    base, model, ids = build(name), converted(name, target), random_ids(2, LENGTH)
    paths = [path for path, module in model.named_modules() if isinstance(module, FastWeight)]
    assert len(paths) == 2 and not any("vision" in path or "visual" in path for path in paths)
    read = logits(model, input_ids=ids)
    assert distance(read, logits(base, input_ids=ids)) > 0.02
    losses = cross_entropy(read[:, :-1].mT.float(), ids[:, 1:], reduction="none")
    assert distance(token_losses(model, ids, piece=CHUNK), losses) < 1e-4
    mask = torch.ones_like(ids)
    mask[1, : CHUNK + 2] = 0
    for given in (torch.ones_like(ids), mask):
        made = model.generate(
            ids * given, attention_mask=given, max_new_tokens=2 * CHUNK, do_sample=False, eos_token_id=-1
        )
        first = int(given[1].argmax())
        again = logits(model, input_ids=made[1:, first:])[0, LENGTH - first - 1 : -1]
        chosen = again.gather(-1, made[1, LENGTH:, None])[:, 0]
        assert (again.max(-1).values - chosen).max() < 1e-3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert is_converted(loaded) and torch.equal(logits(loaded, input_ids=ids), logits(model, input_ids=ids))


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_read_and_written(name: str) -> None:
    """Positions of images have three axes, and some families let an image's tokens see each other."""
    model, ids = converted(name), random_ids(1, LENGTH)
    ids[0, 5:11] = torch.tensor([103, 101, 101, 101, 101, 104])
    kinds = {"mm_token_type_ids": (ids == 101).long()} if name != "Llava" else {}
    if name == "Gemma3":
        kinds = {"token_type_ids": (ids == 101).long()}
    seen = {**IMAGES[name], **kinds}
    text = {
        "max_new_tokens": 2 * CHUNK,
        "do_sample": False,
        "eos_token_id": -1,
        "suppress_tokens": list(range(97, 120)),
    }
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **text, **seen)
    longer = {
        key: torch.nn.functional.pad(value, (0, 2 * CHUNK)) if value.shape == ids.shape else value
        for key, value in seen.items()
    }
    again = logits(model, input_ids=made, attention_mask=torch.ones_like(made), **longer)[
        0, LENGTH - 1 : -1, :97
    ]
    assert (again.max(-1).values - again.gather(-1, made[0, LENGTH:, None])[:, 0]).max() < 1e-3
    other = {**seen, "pixel_values": seen["pixel_values"].flip(-1)}
    with inplace_ttt.disable_ttt(model):
        off = distance(logits(model, input_ids=ids, **seen), logits(model, input_ids=ids, **other))
    assert off > 0, "the image must be seen for this test to mean anything"


def test_a_model_that_reads_its_prompt_in_both_directions_is_refused() -> None:
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        image_token_index=101,
        projection_dim=32,
    )
    with pytest.raises(InPlaceTTTError, match="tokens see later ones"):
        convert(transformers.PaliGemmaForConditionalGeneration(config), InPlaceTTTConfig(layers=(0,)))

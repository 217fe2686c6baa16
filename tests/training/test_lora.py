"""LoRA on a recipe's model: what is trained, how it is saved, loaded again and merged."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models import distance, logits
from peft import PeftModel
from safetensors.torch import load_file

from inplace_ttt import InPlaceTTTError, load
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.model import build_model, meta_model
from inplace_ttt.training.recipe.changes import Facts, changes, facts_of

from .recipes import tiny_recipe
from .saved_models import IDS, LORA, at

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")


def test_lora_is_as_the_recipe_says(tmp_path: Path) -> None:
    lora = {"rank": 3, "alpha": 12.0, "dropout": 0.25, "targets": ["q_proj"]}
    model = build_model(tiny_recipe(tmp_path, "model.dtype=bfloat16", training={**LORA, "lora": lora}))
    adapted = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj")
    assert (adapted.r["default"], adapted.scaling["default"], adapted.lora_dropout["default"].p) == (
        3,
        4.0,
        0.25,
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "ZeRO-3 refuses a mixture"
    assert sum(".lora_A." in name for name, _ in model.named_parameters()) == 3


def trained(model: PeftModel) -> PeftModel:
    """A few steps on the adapter and the writer."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_lora_adapter_holds_what_was_trained_and_reloads_exactly(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, **at(saved["full"]), training=LORA)
    model = trained(build_model(recipe))
    expected = logits(model, IDS)
    model.save_pretrained(tmp_path / "lora")
    names = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert sum(".ttt." in name for name in names) == 4 and all(
        ".ttt." in name or ".lora_" in name for name in names
    )
    reloaded = PeftModel.from_pretrained(load(saved["full"], dtype=torch.float32), tmp_path / "lora")
    assert torch.equal(logits(reloaded, IDS), expected)
    assert distance(expected, logits(load(saved["full"], dtype=torch.float32), IDS)) > 0.01


def test_lora_learns_beside_loss_gradients_and_reloads_exactly(
    reads_by_gradient: Path, tmp_path: Path
) -> None:
    model = trained(build_model(tiny_recipe(tmp_path, **at(reads_by_gradient), training=LORA)))
    expected = logits(model, IDS)
    model.save_pretrained(tmp_path / "lora")
    before = load(reads_by_gradient, dtype=torch.float32)
    assert distance(expected, logits(before, IDS)) > 0.01
    assert torch.equal(logits(PeftModel.from_pretrained(before, tmp_path / "lora"), IDS), expected)
    assert (
        distance(
            logits(load(tmp_path / "lora", base=str(reads_by_gradient), dtype=torch.float32), IDS), expected
        )
        < 1e-5
    )


def test_lora_merges_and_keeps_the_trained_writer(saved: dict[str, Path], tmp_path: Path) -> None:
    model = trained(build_model(tiny_recipe(tmp_path, **at(saved["full"]), training=LORA)))
    expected = logits(model, IDS)
    writers = {
        index: [p.clone() for p in layer.ttt.parameters()] for index, layer in fast_weights(model).items()
    }
    merged = model.merge_and_unload()
    assert distance(logits(merged, IDS), expected) < 5e-5
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged", dtype=torch.float32)
    assert torch.equal(logits(again, IDS), logits(merged, IDS))
    before = fast_weights(load(saved["full"]))
    for index, layer in fast_weights(again).items():
        kept = list(writers[index])[-2:]  # PEFT keeps the untrained copy first
        assert all(torch.equal(a, b) for a, b in zip(layer.ttt.parameters(), kept, strict=True))
        assert not torch.equal(layer.ttt.conv, before[index].ttt.conv)


def other_attention(model: Path, folder: Path) -> Path:
    """The same model with other weights in its attention alone, under the same W0."""
    other = load(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "q_proj" in name:
                parameter.mul_(1.5)
    other.save_pretrained(folder)
    return folder


def test_what_lora_stands_on_cannot_change_within_a_run(saved: dict[str, Path], tmp_path: Path) -> None:
    """Its checkpoints hold the adapter alone, so that the rest comes from model.path at every start."""

    def facts(path: Path, **settings: Any) -> Facts:
        recipe = tiny_recipe(tmp_path, **at(path), training={**LORA, **settings})
        return facts_of(recipe, meta_model(recipe))

    first = facts(saved["full"])
    for same in (shutil.copytree(saved["full"], tmp_path / "moved"), saved["adapter"]):
        assert changes(first, facts(same), "here") == []
    with pytest.raises(
        InPlaceTTTError,
        match=r"here was trained with model.path.sha256 '.*', not '.*', which cannot change within a run",
    ):
        changes(first, facts(other_attention(saved["full"], tmp_path / "other")), "here")
    whole = {"trainable": "ttt", "lora": None}
    # all weights are in the checkpoint
    assert changes(facts(saved["full"], **whole), facts(tmp_path / "other", **whole), "here") == []


def test_lora_spares_the_fast_weights_by_a_pattern(tmp_path: Path) -> None:
    targets = r".*layers\.1\.mlp\.down_proj"
    model = build_model(tiny_recipe(tmp_path, training={**LORA, "lora": {"targets": targets}}))
    assert {name.partition(".mlp")[0][-1] for name, p in model.named_parameters() if ".lora_" in name} == {
        "1"
    }


def test_a_plan_makes_no_weights_of_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a moment: PEFT makes them where tensors are made, and moves them to the base's device."""
    made_on = []
    wrap = peft.get_peft_model
    monkeypatch.setattr(
        peft,
        "get_peft_model",
        lambda *args, **kwargs: made_on.append(torch.get_default_device()) or wrap(*args, **kwargs),
    )
    model = meta_model(tiny_recipe(tmp_path, training=LORA))
    assert made_on == [torch.device("meta")] and all(parameter.is_meta for parameter in model.parameters())

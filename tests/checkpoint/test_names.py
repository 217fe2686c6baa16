"""Checkpoints whose tensors transformers renames when it loads them: vision-language models, and text models
saved otherwise."""

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from families import build as build_text
from models import distance, logits, random_ids, turn_writer_on
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import Transpose, WeightConverter
from vision_language import CONFIGS, build

from inplace_ttt import InPlaceTTTError, cli, load
from inplace_ttt.checkpoint.fingerprint import fingerprint_of
from inplace_ttt.checkpoint.folder_fingerprint import base_fingerprint_in, fingerprint_in
from inplace_ttt.checkpoint.reading import Checkpoint, layer_of
from inplace_ttt.checkpoint.saved_tensors import lacking
from inplace_ttt.families import auto_class
from inplace_ttt.surgery import fast_weights, is_converted

FORMS = ("as saved", "as the parameters", "without the prefix")
"""As transformers saves the public checkpoints' names; as the model calls its parameters; and these without
the base model's prefix."""
IDS = random_ids(2, 40)


def save(model: PreTrainedModel, folder: Path, form: str) -> Path:
    model.save_pretrained(folder)
    if form != "as saved":
        names = {name: name for name in model.state_dict()}
        if form == "without the prefix":
            names = {name: name.removeprefix(f"{model.base_model_prefix}.") for name in names}
        tensors = {names[name]: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sample(3)
def test_a_vision_language_checkpoint_goes_all_the_way(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Converted, described, loaded with its vision tower, saved, loaded again, and as an adapter."""
    model = build(name)
    base = save(model, tmp_path / "base", form)
    capsys.readouterr()
    assert run("convert", base, tmp_path / "out", "--layers", "0,2", "--chunk-size", 7, "--json") == 0
    assert json.loads(capsys.readouterr().out)["identity"]["max_abs_logit_diff"] < 1e-6
    assert run("info", tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["fast_weights"] == [[32, 48], [32, 48]]
    loaded = load(tmp_path / "out")
    assert type(loaded).__name__ == type(model).__name__ and sorted(fast_weights(loaded)) == [0, 2]
    assert distance(logits(loaded, IDS), logits(model, IDS)) < 1e-5
    turn_writer_on(loaded)
    for parameter in loaded.parameters():
        if parameter.ndim == 4:  # of the vision tower: saving keeps what training moved there
            parameter.data.add_(1)
    loaded.save_pretrained(tmp_path / "trained")
    assert lacking(tmp_path / "trained", loaded) is None
    again = load(tmp_path / "trained")
    by_class = AutoModelForImageTextToText.from_pretrained(tmp_path / "trained")
    assert is_converted(by_class)
    expected, given = logits(loaded, IDS), dict(loaded.named_parameters())
    assert torch.equal(logits(again, IDS), expected) and torch.equal(logits(by_class, IDS), expected)
    assert all(torch.equal(parameter, given[name]) for name, parameter in again.named_parameters())
    assert fingerprint_in(tmp_path / "trained") == fingerprint_of(again)
    assert again.generate(IDS, max_new_tokens=9, do_sample=False).shape[1] > IDS.shape[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["Gemma3", "Qwen3VL"])
@pytest.mark.sample(1)
def test_an_adapter_of_a_vision_language_checkpoint(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save(build(name), tmp_path / "base", form)
    options = ("--layers", "0,2", "--chunk-size", 7)
    assert run("convert", base, tmp_path / "adapter", *options, "--adapter-only") == 0
    assert run("convert", base, tmp_path / "full", *options) == 0
    assert run("export", tmp_path / "adapter", tmp_path / "full-2", "--format", "full") == 0
    assert run("export", tmp_path / "full", tmp_path / "adapter-2", "--format", "adapter") == 0
    folders = [tmp_path / "adapter", tmp_path / "full-2", tmp_path / "adapter-2", tmp_path / "full"]
    first, *others = (logits(load(folder), IDS) for folder in folders)
    assert all(torch.equal(first, other) for other in others)
    assert len({base_fingerprint_in(folder) for folder in [base, *folders]}) == 1
    model = load(tmp_path / "full")
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 1
    model.save_pretrained(tmp_path / "trained")
    capsys.readouterr()
    assert run("export", tmp_path / "trained", tmp_path / "adapter-3", "--format", "adapter") == 2
    assert "an adapter would lose" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@pytest.mark.sample(3)
def test_text_models_saved_under_other_names(name: str, form: str, tmp_path: Path) -> None:
    model = build_text(name)
    base = save(model, tmp_path / "base", form)
    assert run("convert", base, tmp_path / "out", "--layers", "0,2", "--chunk-size", 7) == 0
    assert distance(logits(load(tmp_path / "out"), IDS), logits(model, IDS)) < 1e-5


def test_weights_of_another_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save(build("Llava"), tmp_path / "base", "as saved")
    tensors = load_file(base / "model.safetensors")
    save_file(
        {name.replace("language_model", "tower"): tensor for name, tensor in tensors.items()},
        base / "model.safetensors",
    )
    assert run("convert", base, tmp_path / "out", "--layers", "0,2") == 2
    problem = capsys.readouterr().err.strip().splitlines()[-1]
    assert "lacks a tensor for model.language_model.layers.0.mlp.down_proj.weight" in problem


def test_a_name_is_found_by_transformers_own_rules(tmp_path: Path) -> None:
    model = build("Gemma3")
    names = Checkpoint.open(save(model, tmp_path, "as saved")).names(model)
    assert (
        names["model.language_model.layers.1.mlp.down_proj.weight"]
        == "language_model.model.layers.1.mlp.down_proj.weight"
    )
    with pytest.raises(InPlaceTTTError, match="lacks a tensor for model"):
        names["model.language_model.layers.9.mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.language_model.model.", "model.language_model."),  # as transformers 5.10 to 5.23 saved some
        ("language_model.", "model.language_model."),
    ],
)
@pytest.mark.parametrize("name", ["Llava", "Qwen2_5_VL"])
@pytest.mark.sample(1)
def test_older_names(name: str, old: str, new: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "base")
    tensors = {key.replace(new, old, 1): tensor.clone() for key, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    assert run("convert", tmp_path / "base", tmp_path / "out", "--layers", "0,2", "--chunk-size", 7) == 0
    assert distance(logits(load(tmp_path / "out"), IDS), logits(model, IDS)) < 1e-5


def test_a_weight_that_is_computed_from_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save(build_text("llama"), tmp_path / "base", "as saved")
    rule = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1)])
    monkeypatch.setattr("inplace_ttt.checkpoint.names.get_model_conversion_mapping", lambda model: [rule])
    assert run("convert", base, tmp_path / "out", "--layers", "0,2") == 2
    problem = capsys.readouterr().err.strip().splitlines()[-1]
    assert "stores model.layers.0.mlp.down_proj.weight as" in problem and "convert it in memory" in problem


def test_the_layer_is_the_first_number_of_a_name() -> None:
    assert layer_of("transformer.h.4.ffn.2.ttt.proj") == 4
    assert layer_of("model.language_model.layers.11.mlp.down_proj.ttt.keys.directions") == 11
    assert layer_of("model.layers.1.mlp.down_proj.weight") is None


def test_the_class_is_the_one_that_the_config_names() -> None:
    vision, text = CONFIGS["Llava"](), build_text("llama").config
    assert auto_class(vision) is AutoModelForImageTextToText and auto_class(text) is AutoModelForCausalLM
    both = CONFIGS["Gemma3"]()
    both.architectures = ["Gemma3ForConditionalGeneration"]
    assert auto_class(both)._model_mapping[type(both)].__name__ == "Gemma3ForConditionalGeneration"

"""Tensors that are not those of the config beside them: a checkpoint, a base, an adapter is refused by the
tensor's name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from models import random_ids
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint.folders import save_base
from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, cli, convert, load, save_adapter
from inplace_ttt.calibration.calibrate import calibrate
from inplace_ttt.checkpoint.layer_tensors import kinds
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.config_tables import KeyWhitening

EXTENSIONS: dict[str, Any] = {
    "update_rule": "ridge",
    "ridge": 1.0,
    "whitening": KeyWhitening(rank=8),
    "normalize_targets": True,
    "write_gate": True,
}
CONFIG = InPlaceTTTConfig(layers=(0, 2), chunk_size=7, **EXTENSIONS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, and its conversion with every tensor that there is, as a full checkpoint and as an adapter."""
    made = tmp_path_factory.mktemp("made")
    base = save_base(made / "base")
    model = convert(load_base(base), CONFIG)
    calibrate(model, [random_ids(1, 60)])
    model.save_pretrained(made / "full")
    save_adapter(model, made / "adapter", base=str(base))
    return {name: made / name for name in ("base", "full", "adapter")}


def changed(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a folder whose one file of tensors is changed."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, shard, {"format": "pt"})
    return folder


def named(tensors: dict[str, Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


@pytest.mark.parametrize("form", ["full", "adapter"])
@pytest.mark.parametrize("kind", sorted(kinds(CONFIG)))
def test_another_shape(kind: str, form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        name = named(tensors, kind)
        tensors[name] = torch.cat([tensors[name].reshape(-1), torch.zeros(1)])

    with pytest.raises(InPlaceTTTError, match=rf"{kind}( of layer 0)? is \[\d+\][ ,]"):
        load(changed(folders[form], tmp_path / "other", widen))


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_fewer_directions_than_the_config_has(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    def fewer(tensors: dict[str, Tensor]) -> None:
        for ending in ("keys.directions", "write_gate.gate"):
            tensors[name] = tensors[name := named(tensors, ending)][:-1]

    with pytest.raises(InPlaceTTTError, match=r"keys.directions"):
        load(changed(folders[form], tmp_path / "other", fewer))


def test_more_layers_than_the_config_names(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers would leave their fast weights out."""
    other = changed(folders["full"], tmp_path / "other", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    config["inplace_ttt"]["config"]["layers"] = [0]
    (other / "config.json").write_text(json.dumps(config))
    for read in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(
            InPlaceTTTError,
            match=r"has 7 tensors of fast weights in layers that its config does not name \(.*layers.2",
        ):
            read(other)


@pytest.mark.parametrize("read", [load, AutoModelForCausalLM.from_pretrained], ids=["load", "auto"])
def test_an_unknown_key_beside_the_config(
    read: Callable[[Path], object], folders: dict[str, Path], tmp_path: Path
) -> None:
    other = changed(folders["full"], tmp_path / "other", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    config["inplace_ttt"]["eta"] = 0.5
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InPlaceTTTError, match=r"config.json, inplace_ttt, eta: unknown setting; known here: "
    ):
        read(other)


def test_a_tensor_of_the_base_has_another_shape(folders: dict[str, Path], tmp_path: Path) -> None:
    def narrow(tensors: dict[str, Tensor]) -> None:
        for ending in ("0.self_attn.q_proj.weight", "1.self_attn.q_proj.weight"):
            tensors[name] = tensors[name := named(tensors, ending)][:3]

    other = changed(folders["base"], tmp_path / "other", narrow)
    said = (
        r"layers.0.self_attn.q_proj.weight is \[3, 32\], but its config.json gives \[32, 32\] \(1 more "
        r"differ\); use the config and"
    )
    with pytest.raises(InPlaceTTTError, match=said):
        load_base(other)
    assert load_base(other, ignore_mismatched_sizes=True) is not None


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "head_dim"])
def test_a_config_of_a_far_larger_model(key: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers would allocate and initialize all of it before it compares shapes."""
    other = changed(folders["base"], tmp_path / "other", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {key: 10**8}))
    with pytest.raises(
        InPlaceTTTError,
        match=r"its config.json describes [\d,]+ parameters, but its weights take [\d,]+ bytes",
    ):
        load_base(other)


def test_there_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, said in (
        (tmp_path / "gone", "gone does not exist"),
        (tmp_path / "file", "file is a file"),
        ("", "is empty"),
    ):
        with pytest.raises(
            InPlaceTTTError, match=f"{said}.*; give (a model folder|the model's folder) or a hub id"
        ):
            load_base(place)


def test_a_base_lacks_a_tensor(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would go on with random numbers in its place."""
    half = changed(
        folders["base"],
        tmp_path / "half",
        lambda tensors: tensors.pop(named(tensors, "1.self_attn.q_proj.weight")),
    )
    said = f"{half} lacks 1 tensors of a LlamaForCausalLM (model.layers.1.self_attn.q_proj.weight, …)"
    with pytest.raises(InPlaceTTTError) as refused:
        load_base(half)
    assert said in str(refused.value)
    assert cli.main(["convert", str(half), str(tmp_path / "out"), "--layers", "0"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [[], ["--set", "normalize_targets=true"], ["--set", "proj_init=calibrated"], ["--preset", "ridge"]],
    ids=str,
)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_base_holds_what_is_no_number(
    number: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the proof, which compares it with itself, nor a calibration goes on with it."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[named(tensors, "1.mlp.gate_proj.weight")][0, 0] = float(number)

    base = changed(tiny.save_base(tmp_path / "base"), tmp_path / "other", spoil)
    (tmp_path / "book.txt").write_text(tiny.text(words=100))
    read = ["--calibrate", str(tmp_path / "book.txt"), "--no-verify"] if options else []
    assert cli.main(["convert", str(base), str(tmp_path / "out"), "--layers", "0", *options, *read]) == 2
    assert "not finite" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_text_to_calibrate_on_is_read_by_another_tokenizer(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = changed(folders["base"], tmp_path / "other", lambda tensors: None)
    tiny.tokenizer().save_pretrained(base)
    (tmp_path / "book.txt").write_text(tiny.text(words=100))
    how = ["--layers", "0", "--preset", "ridge", "--calibrate", str(tmp_path / "book.txt")]
    assert cli.main(["convert", str(base), str(tmp_path / "out"), *how]) == 2
    assert "has the tokenizer of another model" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_peft_adapter_is_not_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    adapted = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        modules_to_save=["ttt"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    get_peft_model(load(folders["full"]), adapted).save_pretrained(tmp_path / "whole")
    load(tmp_path / "whole")

    def lose(ending: str) -> Callable[[dict[str, Tensor]], object]:
        return lambda tensors: tensors.pop(named(tensors, ending))

    for kind in ("lora_A.weight", "lora_B.weight", "ttt.conv"):
        with pytest.raises(InPlaceTTTError, match=rf"layers.0\..*{kind}"):
            load(changed(tmp_path / "whole", tmp_path / kind, lose(kind)))
    more = {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)}
    with pytest.raises(InPlaceTTTError, match=r"has 1 tensors without a place in its base \(.*layers.9"):
        load(changed(tmp_path / "whole", tmp_path / "more", lambda tensors: tensors.update(more)))

"""The reference format: its tensors and keys in and out, against the formulation its code runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from models import distance, logits, random_ids, turn_writer_on
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from checkpoint.folders import save_base, tensors_of
from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, calibrate, cli, convert, load
from inplace_ttt.checkpoint.loading import load_base
from inplace_ttt.checkpoint.reading import Checkpoint
from inplace_ttt.ops.benchmark import materializing
from inplace_ttt.surgery import config_of

CHUNK = 8


def write_reference_format(folder: Path, **keys: object) -> Path:
    """A tiny checkpoint as the reference code saves it, layer 5 named though the model has three."""
    save_base(folder, "qwen3")
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in (0, 2):
        tensors[f"model.layers.{layer}.mlp.ttt_conv.weight"] = (
            torch.randn(32, 1, 5, generator=generator) * 0.02
        )
        if keys.get("ttt_proj", True):
            tensors[f"model.layers.{layer}.mlp.ttt_proj.weight"] = (
                torch.randn(32, 32, generator=generator) * 0.1
            )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    ours = {
        "ttt_mode": True,
        "ttt_layers": [0, 2, 5],
        "ttt_proj": True,
        "ttt_lr": 0.7,
        "ttt_chunk": CHUNK,
        "ttt_target": "hidden_states",
    }
    (folder / "config.json").write_text(json.dumps({**config, **ours, **keys}))
    return folder


class PublicDownProjection(nn.Module):
    """What the public training code computes in place of the down-projection, from its own tensors."""

    def __init__(self, weight: torch.Tensor, conv: torch.Tensor, proj: torch.Tensor, eta: float) -> None:
        super().__init__()
        self.weight, self.conv, self.proj, self.eta = weight, conv, proj, eta
        self.mlp_input = torch.empty(0)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        chunks = self.mlp_input.view(-1, CHUNK, 32).transpose(1, 2)
        target = (
            nn.functional.conv1d(chunks, self.conv, padding=2, groups=32).transpose(1, 2).reshape(1, -1, 32)
            @ self.proj
        )
        # that function's own rate is 0.1
        return materializing(z, target * self.eta / 0.1, self.weight, CHUNK)


@torch.no_grad()
def test_import_computes_what_the_reference_code_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_reference_format(tmp_path / "reference")
    capsys.readouterr()  # saving may have imported DeepSpeed, which says so
    assert cli.main(["import-reference", str(reference), str(tmp_path / "ours"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["layers"] == [0, 2]
    assert result["ignored_layers"] == [5]
    model = load(tmp_path / "ours")
    tensors = load_file(reference / "model.safetensors")
    public = AutoModelForCausalLM.from_pretrained(reference).eval()
    for layer in (0, 2):
        mlp = public.model.layers[layer].mlp
        down = PublicDownProjection(
            mlp.down_proj.weight,
            *(tensors[f"model.layers.{layer}.mlp.ttt_{kind}.weight"] for kind in ("conv", "proj")),
            eta=0.7,
        )
        mlp.down_proj = down
        mlp.register_forward_pre_hook(lambda _, args, down=down: setattr(down, "mlp_input", args[0]))
    ids = random_ids(1, 5 * CHUNK)
    found, expected = logits(model, ids), logits(public, ids)
    assert distance(found, expected) < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(reference).eval()
    assert distance(logits(plain, ids), expected) > 0.05, "the writes must show"


def test_import_leaves_no_foreign_tensor(tmp_path: Path) -> None:
    cli.main(
        ["import-reference", str(write_reference_format(tmp_path / "reference")), str(tmp_path / "ours")]
    )
    assert not any("ttt_conv" in name or "ttt_proj" in name for name in tensors_of(tmp_path / "ours"))
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]


def test_without_projection_it_is_the_identity(tmp_path: Path) -> None:
    assert (
        cli.main(
            [
                "import-reference",
                str(write_reference_format(tmp_path / "reference", ttt_proj=False)),
                str(tmp_path / "ours"),
            ]
        )
        == 0
    )
    assert torch.equal(tensors_of(tmp_path / "ours")["model.layers.2.mlp.down_proj.ttt.proj"], torch.eye(32))


def test_export_is_the_inverse_of_import(tmp_path: Path) -> None:
    reference = write_reference_format(tmp_path / "reference", ttt_layers=[0, 2], ttt_target="input_embed")
    cli.main(["import-reference", str(reference), str(tmp_path / "ours")])
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--format", "reference"]) == 0
    before, after = tensors_of(reference), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (reference / "config.json").read_text()
    )


def test_export_of_a_saved_model_drops_our_tensors(tmp_path: Path) -> None:
    """save_pretrained puts all tensors into one file; the reference folder gets that file without ours."""
    cli.main(
        ["import-reference", str(write_reference_format(tmp_path / "reference")), str(tmp_path / "ours")]
    )
    model = load(tmp_path / "ours")
    turn_writer_on(model)
    model.save_pretrained(tmp_path / "trained")
    assert (
        cli.main(["export", str(tmp_path / "trained"), str(tmp_path / "back"), "--format", "reference"]) == 0
    )
    assert not any(".ttt." in name for name in tensors_of(tmp_path / "back"))
    cli.main(["import-reference", str(tmp_path / "back"), str(tmp_path / "again")])
    again = load(tmp_path / "again")
    assert config_of(again) == config_of(model)
    assert torch.equal(logits(again, random_ids(1, 40)), logits(model, random_ids(1, 40)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ttt_mode": False}, "ttt_mode false"),
        ({"ttt_target": "labels"}, "ttt_target 'labels'"),
        ({"ttt_layers": [0, 1, 2]}, "lacks model.layers.1.mlp.ttt_conv.weight"),
        ({"ttt_layers": [0, 0]}, "names a layer twice"),
        ({"ttt_layers": []}, "non-empty list"),
        ({"ttt_layers": [3, 5]}, "names only layers [3, 5]"),
        ({"ttt_layers": "all"}, "ttt_layers"),
        ({"ttt_chunk": 0}, "chunk_size"),
        ({"ttt_lr": "fast"}, "eta"),
    ],
)
def test_bad_reference_checkpoints(
    keys: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_reference_format(tmp_path / "reference", **keys)
    capsys.readouterr()
    assert cli.main(["import-reference", str(reference), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "ours").exists()


def test_what_the_reference_code_trained_is_not_converted_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_reference_format(tmp_path / "reference")
    assert cli.main(["convert", str(reference), str(tmp_path / "ours"), "--chunk-size", "4"]) == 2
    assert "has fast weights of the reference code, which would be lost" in capsys.readouterr().err
    # as a recipe's model, or an evaluation's base
    with pytest.raises(InPlaceTTTError, match="has fast weights of the reference code"):
        load_base(tmp_path / "reference")


@pytest.mark.parametrize(
    ("name", "message"), [("model.norm.weight", "lacks"), ("model.layers.1.mlp.up_proj.weight", "holds")]
)
def test_an_import_can_be_loaded(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor of the base is missing, or another model's."""
    reference = write_reference_format(tmp_path / "reference")
    tensors = load_file(reference / "model.safetensors")
    tensors[name] = tensors[name][:-1]
    if message == "lacks":
        del tensors[name]
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    assert cli.main(["import-reference", str(reference), str(tmp_path / "ours")]) == 2
    assert f"{reference} {message} {name}" in capsys.readouterr().err and not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("family", "arguments", "reason"),
    [
        ("gpt2", [], "this is a gpt2"),
        ("llama", ["--preset", "paper"], ""),
    ],
)
def test_export_refuses_what_the_format_cannot_hold(
    family: str, arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(
        [
            "convert",
            str(save_base(tmp_path / "base", family)),
            str(tmp_path / "full"),
            "--no-verify",
            *arguments,
        ]
    )
    capsys.readouterr()
    code = cli.main(["export", str(tmp_path / "full"), str(tmp_path / "out"), "--format", "reference"])
    assert code == (2 if reason else 0)
    said = capsys.readouterr().err
    assert reason in said and ("inplace-ttt export:" in said) == bool(reason)


LEAST_SQUARES = {"update_rule": "ridge", "ridge": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "layers": {"layers": (2,)},
    "chunk_size": {"chunk_size": 16},
    "eta": {"eta": 0.25},
    "target": {"target": "hidden_states"},
    "steps_per_chunk": {"target": "gradient", "steps_per_chunk": 2},
    "conv": {"conv": "causal"},
    "kernel_size": {"kernel_size": 3},
    "clip": {"clip": {"max_norm": 1.0}},
    "detach_target": {"detach_target": True},
    "update_on_decode": {"update_on_decode": False},
    "update_rule": LEAST_SQUARES,
    "ridge": LEAST_SQUARES,
    "whitening": {"whitening": {"rank": 8}},
    "write_gate": {**LEAST_SQUARES, "whitening": {"rank": 8}, "write_gate": True},
    "normalize_targets": {"normalize_targets": True},
    "proj_init": {"proj_init": "calibrated"},
    "write_norm": {"write_norm": "spectral"},
    "preserve_row_norms": {"preserve_row_norms": True},
    "prompt_write": {"conv": "next", "prompt_write": {}},
}
"""Each setting at another value than the default, with what that needs."""
OF_THE_START = {"proj_init"}
"""What P began as: its tensor holds what came of it."""


def test_every_setting_is_tried() -> None:
    assert list(SETTINGS) == [field.name for field in dataclasses.fields(InPlaceTTTConfig)]


@pytest.mark.parametrize("name", [*SETTINGS, "eta a layer"])
def test_a_setting_comes_back_or_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = InPlaceTTTConfig(
        **{"layers": (0, 2), "chunk_size": CHUNK, **SETTINGS.get(name, {"eta": (0.5, 0.25)})}
    )
    model = convert(build("llama"), config)
    if config.needs_calibration:
        calibrate(model, [random_ids(1, 64)])
    model.save_pretrained(tmp_path / "ours")
    code = cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "reference"), "--format", "reference"])
    if code:
        assert code == 2 and "the reference format cannot hold this checkpoint: " in capsys.readouterr().err
        return
    assert cli.main(["import-reference", str(tmp_path / "reference"), str(tmp_path / "back")]) == 0
    back = Checkpoint.open(tmp_path / "back").ttt_config
    assert dataclasses.replace(back, **{start: getattr(config, start) for start in OF_THE_START}) == config

"""Checkpoints of TTT-NTP's public code: read as they are stored, against its training forward written out
from its formulas."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import distance, logits, random_ids
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from checkpoint.folders import save_base, tensors_of
from inplace_ttt import InPlaceTTTConfig, cli, load
from inplace_ttt.surgery import config_of

CHUNK = 8
KEYS: dict[str, Any] = {
    "ttt_mode": True, "ttt_layers": [0, 2, 6], "ttt_proj": True, "ttt_proj_init": "diag_shared", "ttt_lr": 0.2, "ttt_chunk": CHUNK,
    "ttt_inner_opt": "specnorm", "ttt_norm_preserve": True, "ttt_target": "hidden_states", "ttt_conv": False, "ttt_predict_mode": "next",
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "raw sums": {"ttt_inner_opt": "sgd", "ttt_norm_preserve": False, "ttt_lr": 0.01},
    "raw sums, rows kept": {"ttt_inner_opt": "sgd", "ttt_lr": 0.02},
    "spectral": {"ttt_norm_preserve": False, "ttt_lr": 0.1},
    "spectral, rows kept": {},
}


def write_ntp(folder: Path, family: str = "qwen3", drop: tuple[str, ...] = (), **keys: Any) -> Path:
    """A tiny checkpoint as the public code saves it, layer 6 named though the model has three."""
    save_base(folder, family)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in (0, 2):
        tensors[f"model.layers.{layer}.mlp.ttt_proj.weight"] = torch.randn(32, 32, generator=generator) * 0.2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = {**json.loads((folder / "config.json").read_text()), **KEYS, **keys}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in values.items() if key not in drop})
    )
    return folder


class NextTokenDownProjection(nn.Module):
    """Z R_cᵀ of each chunk c in its turn: sums of V_cᵀZ_c over all but a chunk's last token, V_t = x_{t+1}
    P."""

    def __init__(self, w0: Tensor, proj: Tensor, eta: float, spectral: bool, keep_rows: bool) -> None:
        super().__init__()
        self.w0, self.proj, self.eta, self.spectral, self.keep_rows = w0, proj, eta, spectral, keep_rows
        self.x = torch.empty(0)

    def forward(self, z: Tensor) -> Tensor:
        return torch.stack([self.row(keys, source) for keys, source in zip(z, self.x, strict=True)])

    def row(self, z: Tensor, x: Tensor) -> Tensor:
        outputs, total = [], torch.zeros_like(self.w0)
        for start in range(0, len(z), CHUNK):
            keys, source = z[start : start + CHUNK], x[start : start + CHUNK]
            weight = self.w0 + self.eta * total
            if self.keep_rows:
                weight = weight * (self.w0.norm(dim=1) / weight.norm(dim=1))[:, None]
            outputs.append(keys @ weight.T)
            delta = torch.zeros_like(total)
            for t in range(len(keys) - 1):
                delta += torch.outer(source[t + 1] @ self.proj, keys[t])
            total = total + (delta / self.power_norm(delta) if self.spectral else delta)
        return torch.cat(outputs)

    @staticmethod
    def power_norm(delta: Tensor) -> Tensor:
        v = delta.mean(0)
        for _ in range(5):
            u = delta @ v
            u = u / u.norm()
            v = u @ delta
            v = v / v.norm()
        return u @ delta @ v


@torch.no_grad()
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_import_computes_what_the_formulas_say(
    family: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = write_ntp(tmp_path / "public", family, **RECIPES[recipe])
    assert cli.main(["import-reference", str(public), str(tmp_path / "ours"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["format"], result["layers"], result["ignored_layers"]) == ("TTT-NTP", [0, 2], [6])
    keys, tensors = {**KEYS, **RECIPES[recipe]}, load_file(public / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(public).eval()
    for layer in (0, 2):
        mlp = theirs.model.layers[layer].mlp
        proj = tensors[f"model.layers.{layer}.mlp.ttt_proj.weight"]
        spectral = keys["ttt_inner_opt"] == "specnorm"
        down = NextTokenDownProjection(
            mlp.down_proj.weight, proj, keys["ttt_lr"], spectral, keys["ttt_norm_preserve"]
        )
        mlp.down_proj = down
        mlp.register_forward_pre_hook(lambda _, args, down=down: setattr(down, "x", args[0]))
    ids = random_ids(2, 5 * CHUNK + 3)
    found, expected = logits(load(tmp_path / "ours"), ids), logits(theirs, ids)
    assert distance(found, expected) < 2e-5
    plain = AutoModelForCausalLM.from_pretrained(public).eval()
    assert distance(logits(plain, ids), expected) > 0.05, "the writes must show"


def test_import_leaves_nothing_foreign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import-reference", str(write_ntp(tmp_path / "public")), str(tmp_path / "ours")]) == 0
    assert "this is the training form of TTT-NTP" in capsys.readouterr().out
    assert not any(
        key.startswith("ttt_") for key in json.loads((tmp_path / "ours" / "config.json").read_text())
    )
    assert not any("ttt_proj" in name for name in tensors_of(tmp_path / "ours"))
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    capsys.readouterr()
    assert cli.main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--format", "reference"]) == 2
    assert (
        "its targets have a convolution, these do not; it norms neither writes nor rows"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"drop": ("ttt_lr", "ttt_norm_preserve")}, "lacks ttt_lr and ttt_norm_preserve in its config.json"),
        ({"drop": ("ttt_layers",)}, "lacks ttt_layers"),
        ({"ttt_mode": False}, "ttt_mode false"),
        ({"ttt_predict_mode": "past"}, "ttt_predict_mode 'past'"),
        ({"ttt_conv": True}, "ttt_conv True"),
        ({"ttt_target": "input_embed"}, "ttt_target 'input_embed'"),
        ({"ttt_inner_opt": "muon"}, "ttt_inner_opt 'muon'"),
        ({"ttt_norm_preserve": 1}, "ttt_norm_preserve 1"),
        ({"ttt_layers": [0, 1]}, "lacks model.layers.1.mlp.ttt_proj.weight"),
        ({"ttt_lr": "fast"}, "eta"),
        ({"mlp_bias": True, "family": "llama"}, "mlp_bias true"),
        ({"family": "qwen2"}, "is a 'qwen2'"),
    ],
)
def test_what_cannot_be_read_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = write_ntp(tmp_path / "public", **keys)
    capsys.readouterr()
    assert cli.main(["import-reference", str(public), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "ours").exists()


def test_a_damaged_projection_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = write_ntp(tmp_path / "public")
    tensors = load_file(public / "model.safetensors")
    tensors["model.layers.0.mlp.ttt_proj.weight"] = torch.zeros(32, 16)
    save_file(tensors, public / "model.safetensors", {"format": "pt"})
    assert cli.main(["import-reference", str(public), str(tmp_path / "ours")]) == 2
    assert "proj of layer 0 is [32, 16]" in capsys.readouterr().err


def test_the_preset_is_what_their_recipes_share(tmp_path: Path) -> None:
    cli.main(
        [
            "import-reference",
            str(write_ntp(tmp_path / "public", ttt_chunk=1024, ttt_lr=0.3)),
            str(tmp_path / "ours"),
        ]
    )
    imported, preset = config_of(load(tmp_path / "ours")), InPlaceTTTConfig.preset("ttt_ntp", layers=[0, 2])
    assert {**imported.to_dict(), "proj_init": "shared_diagonal"} == preset.to_dict()

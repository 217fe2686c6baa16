"""Checkpoints of forks: a setting or tensor that is not known is mapped, neutral, or refused, never
dropped."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.test_reference_format import write_reference_format
from checkpoint.test_ttt_ntp import write_ntp
from inplace_ttt import cli

WRITERS = {"in-place": write_reference_format, "ttt-ntp": write_ntp}
KEYS = {
    "ttt_write_rule": "nlms",
    "ttt_clip_tau": 1e-5,
    "ttt_decay": 0.99,
    "ttt_momentum": False,
    "use_ttt_gate": True,
    "ttt_eta_per_layer": [0.1, 0.2],
}
TENSORS = {
    "model.layers.0.mlp.ttt_conv.bias": (32,),
    "model.layers.0.mlp.ttt_gate.weight": (1, 32),
    "model.layers.0.mlp.down_proj.ttt_scale": (32,),
    "model.layers.1.mlp.ttt_proj.weight": (32, 32),
    "model.ttt_norm.weight": (32,),
}


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(["import-reference", str(folder), str(folder.parent / "ours")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not (folder.parent / "ours").exists()
    return error


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_setting_of_a_fork_is_refused(
    kind: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = WRITERS[kind](tmp_path / "fork", **{key: KEYS[key]})
    assert f"has {key} " in refused(folder, capsys)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_setting_without_a_value_is_neutral(kind: str, tmp_path: Path) -> None:
    folder = WRITERS[kind](tmp_path / "fork", ttt_clip_tau=None)
    assert cli.main(["import-reference", str(folder), str(tmp_path / "ours")]) == 0
    assert (
        "ttt_clip_tau"
        not in json.loads((tmp_path / "ours" / "config.json").read_text())["inplace_ttt"]["config"]
    )


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_a_fork_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_reference_format(tmp_path / "fork")
    tensors = {**load_file(folder / "model.safetensors"), name: torch.zeros(TENSORS[name])}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert name in refused(folder, capsys)

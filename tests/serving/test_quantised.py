"""A base whose linear maps are int8, weights and activations: what vLLM says first is what the same rounding gives by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import inplace_ttt
from inplace_ttt.surgery import fast_weights
from serving.checkpoints import LIVE, save
from serving.test_tokens import engine, generated, prompts, served

FIRST = 3
"""Tokens; later on, a number that lies between two integers may be rounded the other way by other products."""
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """To int8, a scale for each row."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / scale).round().clamp(-128, 127), scale


def quantise(folder: Path) -> None:
    """Every linear map of the decoder layers, as `compressed-tensors` keeps them; the fast weights' own tensors stay."""
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        values, scale = rounded(tensors[name])
        tensors |= {name: values.to(torch.int8), f"{name}_scale": scale}
    save_file(tensors, shard, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISATION}))


@pytest.mark.parametrize("preset", LIVE)
def test_an_int8_base(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "ttt", "llama", preset)
    model = inplace_ttt.load(tmp_path / "ttt")
    linear, quantised = functional.linear, set()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            values, scale = rounded(parameter.data)
            parameter.data.copy_(values * scale)
            quantised.add(id(parameter))

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) not in quantised:
            return linear(x, weight, bias)
        values, scale = rounded(x)
        return linear(values * scale, weight, bias)

    asked = prompts(*range(70, 310, 20))
    with monkeypatch.context() as patch:
        patch.setattr(functional, "linear", rounding)
        expected = [generated(model, prompt) for prompt in asked]
        for layer in fast_weights(model).values():
            layer.fast.eta = 0.0
        unwritten = [generated(model, prompt) for prompt in asked]
    quantise(tmp_path / "ttt")
    with engine(tmp_path / "ttt") as made:
        found = served(made, asked)

    def alike(others: list[list[int]]) -> int:
        return sum(found[number][:FIRST] == other[:FIRST] for number, other in enumerate(others))

    assert alike(expected) >= 8 and alike(unwritten) <= 3, (alike(expected), alike(unwritten))

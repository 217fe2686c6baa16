"""A base whose linear maps are int8, weights and activations: vLLM's first token is as likely by the same
rounding in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from vllm import _custom_ops as ops

import inplace_ttt
from inplace_ttt.surgery import disable_ttt
from serving.checkpoints import LIVE, save
from serving.test_tokens import engine, prompts, served

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """To int8, a scale for each row."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / scale).round().clamp(-128, 127), scale


def quantize(folder: Path) -> None:
    """Every linear map of the decoder layers, as `compressed-tensors` keeps them; the fast weights' own
    tensors stay."""
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        values, scale = rounded(tensors[name])
        tensors |= {name: values.to(torch.int8), f"{name}_scale": scale}
    save_file(tensors, shard, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))


@torch.no_grad()
def predicted(model: PreTrainedModel, asked: list[list[int]]) -> Tensor:
    """Logits of the token after each prompt [N, V], by transformers."""
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in asked]).float()


def lost(logits: Tensor, tokens: list[int]) -> Tensor:
    """How much lower the logit of each token is than the largest one [N]."""
    return logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


class Product:
    """A linear map by vLLM's own int8 product, which is exact on some processors and saturates on others."""

    def __init__(self, weight: Tensor) -> None:
        values, self.scale = rounded(weight)
        self.width = len(weight)
        self.handler = ops.create_onednn_scaled_mm(
            values.to(torch.int8).t(), self.scale, torch.float32, True, False, 256
        )

    def __call__(self, x: Tensor) -> Tensor:
        values, scale, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]), None, None, True)
        out = torch.empty(len(values), self.width)
        ops.onednn_scaled_mm(self.handler, values, out, scale, None, None, None)
        return out.view(*x.shape[:-1], self.width)


@pytest.mark.parametrize("preset", LIVE)
def test_an_int8_base(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which integer an activation halfway between two becomes depends on the order of the sums before it.

    What such choices change is measured: each activation is moved by 2^-22 of itself. The token that vLLM
    takes may lie below the likeliest by twice that, since two logits have each moved by as much.
    """
    save(tmp_path / "ttt", "llama", preset)
    model = inplace_ttt.load(tmp_path / "ttt")
    linear, moved = functional.linear, 1.0
    products = {
        id(weight): Product(weight.data)
        for name, weight in model.named_parameters()
        if name.endswith("_proj.weight")
    }

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return products[id(weight)](x * moved) if id(weight) in products else linear(x, weight, bias)

    asked = prompts(*range(70, 310, 20))
    with monkeypatch.context() as patch:
        patch.setattr(functional, "linear", rounding)
        expected = predicted(model, asked)
        with disable_ttt(model):
            unwritten = predicted(model, asked)
        moved += 2**-22
        bound = 2 * (predicted(model, asked) - expected).abs().max()
    quantize(tmp_path / "ttt")
    with engine(tmp_path / "ttt") as made:
        done = served(made, asked)
    found = lost(expected, [done[number][0] for number in range(len(asked))])
    without = lost(expected, unwritten.argmax(-1).tolist())
    assert found.max() <= bound < without.max(), (found, bound, without)

"""A base whose linear maps are int8, weights and activations: vLLM's predictions are those of the same rounding in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

import inplace_ttt
from inplace_ttt.surgery import fast_weights
from serving.checkpoints import LIVE, WIDE, save
from serving.test_tokens import engine, prompts

VOCABULARY = WIDE["vocab_size"]
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


@torch.no_grad()
def predicted(model: PreTrainedModel, asked: list[list[int]]) -> Tensor:
    """Log probabilities of the token after each prompt [N, V], by transformers."""
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in asked])


def served(made: LLMEngine, asked: list[list[int]]) -> Tensor:
    """The same by vLLM, all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=VOCABULARY)
    for number, prompt in enumerate(asked):
        made.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found = torch.full((len(asked), VOCABULARY), float("nan"))
    while made.has_unfinished_requests():
        for output in made.step():
            if output.finished:
                for token, known in output.outputs[0].logprobs[0].items():
                    found[int(output.request_id), token] = known.logprob
    return found


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).square().mean().sqrt())


@pytest.mark.parametrize("preset", LIVE)
def test_an_int8_base(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a product's sums decides how an activation between two integers is rounded.

    Two such roundings lie within half a step of the same activation. So they differ by less than rounding itself changes.
    """
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
    unrounded = predicted(model, asked)
    with monkeypatch.context() as patch:
        patch.setattr(functional, "linear", rounding)
        expected = predicted(model, asked)
        for layer in fast_weights(model).values():
            layer.fast.eta = 0.0
        unwritten = predicted(model, asked)
    quantise(tmp_path / "ttt")
    with engine(tmp_path / "ttt", max_logprobs=VOCABULARY) as made:
        found = served(made, asked)
    bound = distance(unrounded, expected)
    assert distance(found, expected) < bound < distance(unwritten, expected) / 2 < distance(found, unwritten), (
        distance(found, expected), bound, distance(found, unwritten),
    )  # fmt: skip

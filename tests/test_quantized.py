"""A quantized base: the additive form over a down-projection whose weight nobody can read, however its
library holds it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from families import build
from models import CHUNK, LAYERS, distance, logits, random_ids, streamed, turn_writer_on
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, QuantoConfig

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, Session, UpdateClip, cli, convert, revert
from inplace_ttt.audit import audit_model
from inplace_ttt.cli.loading import refuse_not_finite
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import fast_weights

QUANTIZERS: dict[str, Callable[[], Any]] = {
    "bitsandbytes": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "quanto": lambda: QuantoConfig(weights="int8"),
}
# as torchao does it: linear maps stay nn.Linear, and their weights are tensors of another kind
BY_WEIGHT = "by weight"
PLAIN = {"bitsandbytes": "Linear4bit", "quanto": "QLinear", BY_WEIGHT: "Linear"}
IDS = random_ids(1, 40)


def build_plain() -> PreTrainedModel:
    return build("llama", hidden_size=64, intermediate_size=128, head_dim=32, vocab_size=400)


def load(folder: Path, quantizer: str) -> PreTrainedModel:
    config = QUANTIZERS["quanto" if quantizer == BY_WEIGHT else quantizer]()
    settings: dict[str, Any] = {"quantization_config": config, "dtype": torch.float32, "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    if quantizer == BY_WEIGHT:
        for name, module in list(model.named_modules()):
            if type(module).__name__ == "QLinear":
                plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                plain.weight = module.weight
                model.set_submodule(name, plain)
    return model.eval()


@pytest.fixture(params=list(PLAIN))
def quantizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(quantizer: str, tmp_path: Path) -> PreTrainedModel:
    build_plain().save_pretrained(tmp_path)
    return load(tmp_path, quantizer)


def test_a_quantized_base(quantizer: str, base: PreTrainedModel, tmp_path: Path) -> None:
    before, plain = logits(base, IDS), type(base.model.layers[0].mlp.down_proj)
    assert plain.__name__ == PLAIN[quantizer]
    # the library's kernels depend on the row count
    split_of_the_base = distance(streamed(base, IDS, [10, 1, 29]), before)
    model = convert(base, InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK))
    assert torch.equal(logits(model, IDS), before)
    turn_writer_on(model)
    whole = logits(model, IDS)
    assert distance(whole, before) > 0.05
    state = Session(model)
    with torch.no_grad():
        parts = [model(piece, **{CACHE: state.cache}).logits for piece in IDS.split([10, 1, 29], 1)]
    assert distance(torch.cat(parts, 1), whole) < 3 * split_of_the_base + 1e-5
    state.save(tmp_path / "state")
    assert Session.load(tmp_path / "state", model).chunks_written == 5
    assert torch.equal(logits(revert(model), IDS), before)
    assert type(model.model.layers[0].mlp.down_proj) is plain


@pytest.mark.parametrize("quantizer", list(QUANTIZERS))
def test_a_converted_folder_is_quantized_while_it_loads(quantizer: str, tmp_path: Path) -> None:
    """The quantizer replaces linear maps while the model is made; what is saved loads again, but transformers
    saves no quanto."""
    model = convert(build_plain(), InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK))
    turn_writer_on(model)
    model.save_pretrained(tmp_path / "plain")
    loaded = load(tmp_path / "plain", quantizer)
    revert(model).save_pretrained(tmp_path / "base")
    expected = convert(load(tmp_path / "base", quantizer), InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK))
    turn_writer_on(expected)
    read = [loaded]
    if quantizer != "quanto":
        loaded.save_pretrained(tmp_path / "again")
        read.append(AutoModelForCausalLM.from_pretrained(tmp_path / "again", device_map="cpu"))
    for each in read:
        assert [type(layer).__name__ for layer in fast_weights(each).values()] == [
            f"FastWeight{PLAIN[quantizer]}"
        ] * 2
        assert torch.equal(logits(each, IDS), logits(expected, IDS))


@pytest.mark.full
def test_the_commands_take_a_quantized_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = convert(build_plain(), InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK))
    turn_writer_on(model)
    model.save_pretrained(tmp_path / "plain")
    folder, text = str(tmp_path / "quantized"), str(tmp_path / "text")
    load(tmp_path / "plain", "bitsandbytes").save_pretrained(folder)
    tiny.byte_level().save_pretrained(folder)
    Path(text).write_text(tiny.text(60))
    assert cli.main(["info", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fast_weight"] == [64, 128]
    assert (
        cli.main(
            [
                "generate",
                folder,
                "--prompt-file",
                text,
                "--max-new-tokens",
                "2",
                "--save-state",
                f"{text}.state",
            ]
        )
        == 0
    )
    assert cli.main(["diagnose", folder, "--text", text, "--out", f"{text}.diagnosis", "--json"]) in (0, 1)
    assert cli.main(["audit", folder, "--json"]) in (0, 1)
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize("quantizer", ["quanto", BY_WEIGHT], indirect=True)
@pytest.mark.full
def test_weights_that_few_operations_know_can_be_audited(base: PreTrainedModel) -> None:
    model = convert(base, InPlaceTTTConfig(layers=(0,), chunk_size=CHUNK))
    refuse_not_finite(model, "the model")
    unread = [
        result.item.id
        for result in audit_model(model).items
        if "quantized or wrapped" in result.outcome.found
    ]
    assert unread == ["fast-tensor", "reset-keeps-training"]


def test_the_writer_learns_on_a_quantized_base(base: PreTrainedModel) -> None:
    model = convert(base, InPlaceTTTConfig(layers=(1,), chunk_size=CHUNK))
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert model.model.layers[1].mlp.down_proj.ttt.conv.grad.abs().max() > 0


def test_a_relative_clip_is_refused(quantizer: str, base: PreTrainedModel) -> None:
    model = convert(
        base, InPlaceTTTConfig(layers=(1,), chunk_size=CHUNK, clip=UpdateClip(0.1, relative=True))
    )
    with pytest.raises(InPlaceTTTError, match=f"{PLAIN[quantizer]} does not show; use an absolute tau"):
        logits(model, IDS)

"""QLoRA: fast weights and LoRA on a base that bitsandbytes holds in four or eight bits, trained, stopped,
resumed and loaded."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny import word_level
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MistralConfig, MistralForCausalLM

from inplace_ttt import InPlaceTTTConfig, InPlaceTTTError, convert
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.model import build_model
from inplace_ttt.training.plan.plan import make_plan
from inplace_ttt.training.recipe.recipe import load_recipe

from .recipes import CONFIG
from .runs import CHUNK, documents, recipe_file, trained, weights

SURGERY = {"layers": [0, 2], "chunk_size": CHUNK}
LORA = {"trainable": "lora", "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}, "steps": 4}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of an unconverted base, whose widths bitsandbytes can block."""
    torch.manual_seed(0)
    base = MistralForCausalLM(
        MistralConfig(**{**CONFIG, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32})
    )
    base.save_pretrained(tmp_path / "base")
    word_level(f"t{i}" for i in range(3, CONFIG["vocab_size"])).save_pretrained(tmp_path / "base")
    monitor = {"save_steps": 2}
    return recipe_file(
        tmp_path,
        tmp_path / "base",
        documents(tmp_path / "text"),
        ttt=SURGERY,
        training=LORA,
        monitor=monitor,
        deepspeed=2,
    )


@pytest.mark.parametrize(
    ("bits", "dtype", "processes"), [("4bit", "float32", 1), ("4bit", "bfloat16", 2), ("8bit", "bfloat16", 1)]
)
@pytest.mark.sample(1)
def test_it_trains_and_resumes(recipe: Path, tmp_path: Path, bits: str, dtype: str, processes: int) -> None:
    """A resumed run gives the same adapter bit for bit, and it goes onto the quantized base."""
    settings = (f"model.load_in={bits}", f"model.dtype={dtype}", f"parallel.nproc_per_node={processes}")
    report, _ = trained(recipe, *settings)
    whole = weights(tmp_path / "out" / "final")
    names = " ".join(whole)
    assert report["steps"] == 4 and "lora_A" in names and ".ttt." in names and "base_layer" not in names
    assert any(tensor.abs().max() > 0 for name, tensor in whole.items() if name.endswith("conv"))
    shutil.rmtree(tmp_path / "out" / "final")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    report, _ = trained(recipe, *settings)
    again = weights(tmp_path / "out" / "final")
    assert report["resumed_from"].endswith("checkpoint-2") and whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)

    quantized = (
        BitsAndBytesConfig(load_in_8bit=True) if bits == "8bit" else BitsAndBytesConfig(load_in_4bit=True)
    )
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=quantized, dtype=getattr(torch, dtype)
    )
    tuned = PeftModel.from_pretrained(convert(base, InPlaceTTTConfig(**SURGERY)), tmp_path / "out" / "final")
    for index, layer in fast_weights(tuned).items():
        name = f"base_model.model.model.layers.{index}.mlp.down_proj.ttt.conv"
        assert torch.equal(layer.ttt.conv.detach().cpu(), whole[name])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("model.load_in=4bit", "training.trainable=all", "training.lora=null"), "frozen"),
        (("model.load_in=4bit", "deepspeed=3"), "ZeRO-3"),
        (("model.load_in=3bit",), r"model\.load_in"),
        (("model.load_in=4bit", "training.trainable=ttt", "training.lora=null"), "trainable: lora"),
    ],
)
def test_what_cannot_be(recipe: Path, settings: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InPlaceTTTError, match=reason):
        load_recipe(recipe, settings)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_its_plan_knows_what_is_packed(recipe: Path, bits: str) -> None:
    """Bytes of the parameters, with the scales of their blocks."""
    planned = load_recipe(recipe, [f"model.load_in={bits}", "model.dtype=bfloat16"])
    model = build_model(planned)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    held = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    for module in model.modules():
        if (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
            held += state.absmax.nbytes + state.state2.absmax.nbytes
        elif (scales := getattr(getattr(module, "weight", None), "SCB", None)) is not None:
            held += scales.nbytes
    assert make_plan(planned).per_device_bytes["parameters"] == pytest.approx(held, rel=0.03)

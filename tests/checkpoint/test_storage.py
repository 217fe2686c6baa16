"""What checkpoints are stored as: float8 bases with scales, integers, companions of every kind, and damage
that is not carried on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import logits, random_ids
from safetensors.torch import load_file, save_file
from tiny import byte_level
from transformers import AutoTokenizer

from checkpoint.folders import save_base, tensors_of
from checkpoint.test_reference_format import write_reference_format
from inplace_ttt import InPlaceTTTError, cli, load
from inplace_ttt.checkpoint.reading import Checkpoint
from inplace_ttt.layer.quantized import parameter_dtype

BLOCK = 16


def save_fp8(folder: Path, name: str = "llama") -> Path:
    """A base as DeepSeek and Qwen store theirs: block-wise float8 matrices, each with `weight_scale_inv`."""
    save_base(folder, name)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight.to(torch.bfloat16)
            continue
        rows, columns = weight.shape
        blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        stored[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "quantization_config": quantized})
    )
    return folder


def converted(base: Path, out: Path, *options: str) -> Path:
    assert (
        cli.main(
            ["convert", str(base), str(out), "--layers", "0,2", "--chunk-size", "8", "--no-verify", *options]
        )
        == 0
    )
    return out


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_float8_base_gets_parameters_that_can_be_trained(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_fp8(tmp_path / "base", name)
    full, adapter = (
        converted(base, tmp_path / "full"),
        converted(base, tmp_path / "adapter", "--adapter-only"),
    )
    assert {tensor.dtype for key, tensor in tensors_of(full).items() if ".ttt." in key} == {torch.bfloat16}
    for folder in (full, adapter):
        assert cli.main(["info", str(folder)]) == 0
    ids = random_ids(1, 20)
    assert torch.equal(logits(load(full), ids), logits(load(adapter), ids))


def test_the_scales_of_a_float8_base_belong_to_its_fingerprint(tmp_path: Path) -> None:
    base = save_fp8(tmp_path / "base")
    adapter = converted(base, tmp_path / "adapter", "--adapter-only")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight_scale_inv"] *= 2
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(InPlaceTTTError, match="was made for a base with other weights"):
        load(adapter)


def test_new_parameters_never_take_a_storage_format() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool):
        assert parameter_dtype(dtype) == torch.bfloat16
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert parameter_dtype(dtype) == dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("kind", ["conv", "proj"])
def test_ttt_tensors_in_a_storage_format_are_refused(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    full = converted(save_base(tmp_path / "base"), tmp_path / "full")
    shard = full / "inplace_ttt.safetensors"
    tensors = load_file(shard)
    name = f"model.layers.2.mlp.down_proj.ttt.{kind}"
    save_file({**tensors, name: tensors[name].to(dtype)}, shard, {"format": "pt"})
    for use in (lambda: load(full), lambda: Checkpoint.open(full).ttt_tensors()):
        with pytest.raises(
            InPlaceTTTError, match=f"{kind} of layer 2 is stored as {str(dtype).removeprefix('torch.')}"
        ):
            use()


COMPANIONS = {
    "additional_chat_templates/tool_use.jinja": "{{ messages }}",
    "tokenization_mine.py": "class Mine: ...",
    "qwen.tiktoken": "YQ== 0\n",
    "tekken.json": "{}",
    "merges.txt": "a b",
    "LICENSE": "free",
    "USE_POLICY.md": "be kind",
    "preprocessor_config.json": "{}",
    "original/params.json": "{}",
}
LEFT = {
    "pytorch_model.bin": "weights",
    "consolidated.00.pth": "weights",
    "original/consolidated.safetensors": "weights",
    "model.gguf": "weights",
    "onnx/model.onnx_data": "weights",
    "checkpoint-5/config.json": "{}",
    "checkpoint-5/trainer_state.json": "{}",
    ".cache/huggingface/download": "x",
    "README.md": "the base's card",
}


def with_companions(folder: Path) -> Path:
    for name, text in {**COMPANIONS, **LEFT}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("form", ["convert", "export", "import"])
def test_companions_of_every_kind_go_along(form: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if form == "import":
        assert (
            cli.main(
                [
                    "import-reference",
                    str(with_companions(write_reference_format(tmp_path / "base"))),
                    str(out),
                ]
            )
            == 0
        )
    else:
        base = with_companions(save_base(tmp_path / "base", "qwen3"))
        converted(base, tmp_path / "full", "--set", "detach_target=false") if form == "export" else converted(
            base, out
        )
        if form == "export":
            assert cli.main(["export", str(tmp_path / "full"), str(out), "--format", "reference"]) == 0
    found = {
        file.relative_to(out).as_posix(): file.read_text()
        for file in out.rglob("*")
        if file.is_file() and file.suffix != ".safetensors"
    }
    assert COMPANIONS.items() <= found.items()
    assert not (LEFT.items() & found.items())


def test_a_template_in_a_subfolder_is_used(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", vocab_size=300)
    tokenizer = byte_level()
    tokenizer.chat_template = {"default": "{{ 'd' }}", "tool_use": "{{ 't' }}"}
    tokenizer.save_pretrained(base)
    assert (base / "additional_chat_templates").is_dir()
    found = AutoTokenizer.from_pretrained(converted(base, tmp_path / "out")).chat_template
    assert set(found) == {"default", "tool_use"}


def nan_in(name: str) -> Any:
    def damage(folder: Path) -> str:
        return rewritten(folder, name, lambda tensor: tensor.index_fill(0, torch.tensor([1]), float("nan")))

    return damage


def rewritten(folder: Path, name: str, change: Any) -> str:
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            shard.unlink()  # it may be a link
            save_file({**tensors, name: change(tensors[name]).contiguous()}, shard, {"format": "pt"})
    return name


W0 = "model.layers.2.mlp.down_proj.weight"
DAMAGE = {
    "W0 is NaN": nan_in(W0),
    "W0 is transposed": lambda folder: rewritten(folder, W0, torch.Tensor.t),
    "W0 is infinite": lambda folder: rewritten(folder, W0, lambda tensor: tensor / 0),
    "embeddings are NaN": nan_in("model.embed_tokens.weight"),
    "a norm is NaN": nan_in("model.norm.weight"),
    "a projection is cut": lambda folder: rewritten(
        folder, "model.layers.0.self_attn.q_proj.weight", lambda tensor: tensor[:-1]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_not_exported(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = converted(save_base(tmp_path / "base", "qwen3"), tmp_path / "full", "--set", "detach_target=false")
    name = DAMAGE[damage](full)
    capsys.readouterr()
    assert cli.main(["export", str(full), str(tmp_path / "out"), "--format", "reference"]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"max_new_tokens": "many"}', '{"do_sample": 3', "\ufeff{}x"])
def test_a_broken_generation_config_is_not_carried_along(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base")
    (base / "generation_config.json").write_text(text)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    capsys.readouterr()
    assert (
        cli.main(
            ["convert", str(base), str(tmp_path / "out"), "--layers", "0", "--chunk-size", "8", "--no-verify"]
        )
        == 2
    )
    assert "generation_config.json" in capsys.readouterr().err and not (tmp_path / "out").exists()

"""LLaMA-Factory by our module: the command on the files of docs/clients.md, and its own packing of rows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, convert
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.surgery import fast_weights

pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed here; `make test-clients` does it")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj"}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's, in a folder that has what they name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    section = PAGE.read_text().partition("## LLaMA-Factory")[2].partition("\n## ")[0]
    (data,) = re.findall(r"^```json\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    Path("dataset_info.json").write_text(data)
    base = tiny.save_llama(
        tmp_path / "smollm2-135m",
        tiny.byte_level(),
        num_hidden_layers=7,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_pretrained(base)
    convert(model, InPlaceTTTConfig(chunk_size=64)).save_pretrained("smollm2-ttt")
    tiny.byte_level().save_pretrained("smollm2-ttt")
    tiny.write_lines(Path("texts.jsonl"), [{"text": tiny.text(200, seed=i)} for i in range(40)])
    tiny.write_lines(
        Path("chats.jsonl"),
        [
            {"instruction": tiny.text(100, seed=i), "input": "", "output": tiny.text(100, seed=i + 40)}
            for i in range(40)
        ],
    )
    return yaml.safe_load(config)


def llamafactory(settings: dict[str, Any], **changes: Any) -> subprocess.CompletedProcess[str]:
    return run("-m", "inplace_ttt.clients.llamafactory", settings={**settings, **changes})


def run(*command: str, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    Path("llamafactory.yaml").write_text(yaml.safe_dump(settings))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command, "llamafactory.yaml"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def lines(output: str = "llamafactory-ttt") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(output, "log.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


def test_the_page_is_true(settings: dict[str, Any]) -> None:
    """Five steps of continued pretraining, then the same run two steps further."""
    done = llamafactory(settings)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5]
    assert {layer["chunks"] for line in lines() for layer in line["layers"]} == {3}
    model = AutoModelForCausalLM.from_pretrained("llamafactory-ttt")
    assert list(fast_weights(model)) == [0, 6]
    for layer in fast_weights(model).values():
        # by its own rate, ten times the other
        assert layer.eta == 1.0 and layer.chunk_size == 64 and layer.ttt.conv.abs().max() > 1e-3
    done = llamafactory(settings, max_steps=7, resume_from_checkpoint="llamafactory-ttt/checkpoint-5")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5, 6, 7]


def test_answers_alone_are_learned_padded_and_packed(settings: dict[str, Any]) -> None:
    sft = {"stage": "sft", "dataset": "chats"}
    done = llamafactory(settings, **sft, per_device_train_batch_size=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(layer["gradients"]["conv"] > 0 for layer in lines()[-1]["layers"])
    done = llamafactory(settings, **sft, neat_packing=True, output_dir="packed", packing=True, max_steps=3)
    assert done.returncode == 0, done.stderr[-2000:]
    # of one document, though a row holds many
    assert {layer["chunks"] for line in lines("packed") for layer in line["layers"]} == {3}


def test_lora_beside_conv_and_p(settings: dict[str, Any]) -> None:
    done = llamafactory(settings, **LORA)
    assert done.returncode != 0 and "conv and P are frozen, so nothing would learn to write" in done.stderr
    done = llamafactory(settings, **LORA, additional_target="ttt")
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(layer["gradients"]["conv"] > 0 for layer in lines()[-1]["layers"])
    export = {
        "model_name_or_path": "./smollm2-ttt",
        "adapter_name_or_path": "llamafactory-ttt",
        "template": "default",
        "trust_remote_code": True,
        "export_dir": "merged",
    }
    done = run("-m", "llamafactory.cli", "export", settings=export)
    assert done.returncode == 0, done.stderr[-2000:]
    for layer in fast_weights(AutoModelForCausalLM.from_pretrained("merged")).values():
        assert layer.ttt.conv.abs().max() > 1e-3


def test_a_base_is_refused(settings: dict[str, Any]) -> None:
    done = llamafactory(settings, model_name_or_path="./smollm2-135m")
    assert done.returncode != 0 and "this LlamaForCausalLM is not converted" in done.stderr
    assert not Path("llamafactory-ttt", "model.safetensors").exists()


def test_its_own_command_loads_no_base_in_place_of_a_converted_folder(settings: dict[str, Any]) -> None:
    """Without our module it lacks the class, and it refuses our section."""
    done = run("-m", "llamafactory.cli", "train", settings=settings)
    assert done.returncode != 0 and "inplace_ttt" in done.stderr
    del settings["inplace_ttt"]
    done = run("-m", "llamafactory.cli", "train", settings=settings)
    assert done.returncode != 0 and "trust_remote_code=True" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": None}, "packing joins documents in rows that do not show where each begins"),
        ({"stage": "sft", "packing": True}, "packing joins documents in rows"),
        ({"inplace_ttt": {"ttt": {"layers": [0]}}}, "LLaMA-Factory trains converted folders alone"),
        ({"inplace_ttt": {"trainings": {}}}, "inplace_ttt, trainings: unknown setting"),
        (
            {"inplace_ttt": {"training": {"conv_learning_rate": -1}}},
            "inplace_ttt, training: conv_learning_rate must be a number above 0, got -1",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    from inplace_ttt.clients.llamafactory import run

    with pytest.raises(InPlaceTTTError, match=re.escape(message)):
        run({**settings, **changes})


def test_packed_rows_are_their_documents(settings: dict[str, Any]) -> None:
    """By LLaMA-Factory's own collator, whose mask of a packed row has four dimensions."""
    from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    tiny.save_converted(Path("smollm2-135m"), Path("writes"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained("writes"), AutoTokenizer.from_pretrained("writes")
    collate = SFTDataCollatorWith4DAttentionMask(
        template=get_template_and_fix_tokenizer(tokenizer, DataArguments(template="default")),
        tokenizer=tokenizer,
        model=model,
        pad_to_multiple_of=8,
        block_diag_attn=True,
        neat_packing=True,
        attn_implementation="sdpa",
    )
    texts = [tokenizer(tiny.text(words, seed=words))["input_ids"] for words in (150, 90, 200)]
    ids = [token for text in texts for token in text]
    row = {
        "input_ids": ids,
        "attention_mask": [i for i, text in enumerate(texts, 1) for _ in text],
        "position_ids": [position for text in texts for position in range(len(text))],
        "labels": ids,
        "images": None,
        "videos": None,
        "audios": None,
    }
    batch = collate([row])
    assert batch["attention_mask"].dim() == 4
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[:, : len(ids)]
        alone = [model(input_ids=torch.tensor([text]), use_cache=False).logits for text in texts]
    assert torch.allclose(logits, torch.cat(alone, 1), atol=1e-3)

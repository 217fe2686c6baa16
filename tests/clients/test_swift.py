"""ms-swift with our plugin: its own commands on the files of docs/clients.md, and its own packing of rows."""

from __future__ import annotations

import json
import math
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
from transformers import AutoModelForCausalLM

from inplace_ttt import InPlaceTTTConfig, convert
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.surgery import fast_weights

pytest.importorskip("swift", reason="ms-swift is not installed here; `make test-clients` does it")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
LORA = {"tuner_type": "lora", "lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's, in a folder that has what they name."""
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("## ms-swift")[2].partition("\n## ")[0]
    (plugin,) = re.findall(r"^```py\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    (config,) = re.findall(r"^```yaml\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    Path("ttt_plugin.py").write_text(plugin)
    tiny.save_llama(
        tmp_path / "smollm2-135m",
        tiny.byte_level(),
        num_hidden_layers=7,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_pretrained("smollm2-135m")
    convert(model, InPlaceTTTConfig(chunk_size=64)).save_pretrained("smollm2-ttt")
    tiny.byte_level().save_pretrained("smollm2-ttt")
    texts = [{"role": "assistant", "content": tiny.text(200, seed=i)} for i in range(40)]
    tiny.write_lines(Path("texts.jsonl"), [{"messages": [text]} for text in texts])
    asked = [{"role": "user", "content": tiny.text(100, seed=i)} for i in range(40, 80)]
    tiny.write_lines(
        Path("chats.jsonl"),
        [
            {"messages": [question, answer], "rejected_response": tiny.text(20)}
            for question, answer in zip(asked, texts, strict=True)
        ],
    )
    return yaml.safe_load(config)


def swift(verb: str, settings: dict[str, Any], **changes: Any) -> subprocess.CompletedProcess[str]:
    Path("swift.yaml").write_text(yaml.safe_dump({**settings, **changes}))
    command = [str(Path(sys.executable).with_name("swift")), verb, "swift.yaml"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def lines(output: str = "swift-ttt") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(output, "log.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


def test_the_page_is_true(settings: dict[str, Any]) -> None:
    """Five steps of continued pretraining, then the same run two steps further."""
    done = swift("pt", settings)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5]
    assert {layer["chunks"] for line in lines() for layer in line["layers"]} == {3}
    model = AutoModelForCausalLM.from_pretrained("swift-ttt/checkpoint-5")
    assert list(fast_weights(model)) == [0, 6]
    for layer in fast_weights(model).values():
        # by its own rate, ten times the other
        assert layer.eta == 1.0 and layer.chunk_size == 64 and layer.ttt.conv.abs().max() > 1e-3
    done = swift("pt", settings, max_steps=7, resume_from_checkpoint="swift-ttt/checkpoint-5")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5, 6, 7]


def test_answers_alone_are_learned_and_preferences(settings: dict[str, Any]) -> None:
    done = swift("sft", settings, dataset="./chats.jsonl")
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(layer["gradients"]["conv"] > 0 for layer in lines()[-1]["layers"])
    Path("ttt_plugin.py").write_text("from inplace_ttt.clients.swift import register\nregister()\n")
    settings |= {"model": "swift-ttt/checkpoint-5", "dataset": "./chats.jsonl", "output_dir": "dpo"}
    done = swift("rlhf", settings, rlhf_type="dpo", max_steps=2)
    assert done.returncode == 0, done.stderr[-2000:]
    # the reference has the fast weights
    assert lines("dpo")[0]["loss"] == pytest.approx(math.log(2), rel=1e-3)


def test_lora_beside_conv_and_p(settings: dict[str, Any]) -> None:
    from peft import PeftModel

    done = swift("pt", settings, **LORA)
    assert done.returncode != 0 and "conv and P are frozen, so nothing would learn to write" in done.stderr
    done = swift("pt", settings, **LORA, modules_to_save="ttt")
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(layer["gradients"]["conv"] > 0 for layer in lines()[-1]["layers"])
    done = swift("export", {"adapters": "swift-ttt/checkpoint-5", "merge_lora": True, "output_dir": "merged"})
    assert done.returncode == 0, done.stderr[-2000:]
    merged = AutoModelForCausalLM.from_pretrained("merged")
    base = AutoModelForCausalLM.from_pretrained("smollm2-ttt")
    adapted = PeftModel.from_pretrained(base, "swift-ttt/checkpoint-5").merge_and_unload()
    for index, layer in fast_weights(merged).items():
        assert layer.ttt.conv.abs().max() > 1e-3
        assert torch.equal(layer.ttt.conv, fast_weights(adapted)[index].ttt.conv)


def test_a_base_is_refused(settings: dict[str, Any]) -> None:
    done = swift("pt", settings, model="./smollm2-135m")
    assert done.returncode != 0 and "this LlamaForCausalLM is not converted" in done.stderr
    assert not Path("swift-ttt/checkpoint-5").exists()


def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    from inplace_ttt.clients.swift import register

    for wrong, message in (
        ({"conv_rate": 1}, "inplace_ttt, training.conv_rate: unknown setting"),
        ({"conv_learning_rate": -1}, "conv_learning_rate must be a number above 0, got -1"),
    ):
        with pytest.raises(InPlaceTTTError, match=re.escape(message)):
            register(**wrong)


def test_a_converted_folder_has_the_model_types_of_its_base(settings: dict[str, Any]) -> None:
    """Otherwise ms-swift would take a template without roles, silently."""
    from swift.model.model_meta import get_matched_model_types

    from inplace_ttt.clients.swift import register

    register()
    for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"):
        assert get_matched_model_types([f"InPlaceTTT{name}"]) == get_matched_model_types([name]) != []


def test_packed_rows_are_their_documents(settings: dict[str, Any]) -> None:
    """By ms-swift's own template and collator. It packs for flash attention alone, which needs a GPU; the
    rows are the same here."""
    from swift.model import get_model_processor
    from swift.template import get_template

    done = swift("pt", settings, packing=True)
    assert done.returncode != 0 and '"packing" feature requires a flash attention' in done.stderr
    tiny.save_converted(Path("smollm2-135m"), Path("writes"))
    model, tokenizer = get_model_processor("writes", model_type="llama", torch_dtype=torch.float32)
    template = get_template(tokenizer, template_type="chatml", max_length=2048, padding_free=True)
    template.set_mode("train")
    chats = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()[:4]]
    rows = [template.encode({"messages": chat["messages"]}) for chat in chats]
    for row in rows:
        row["length"] = len(row["input_ids"])
    packed = template.data_collator([*rows])
    with torch.no_grad():
        logits = model(
            input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=False
        ).logits
        alone = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits for row in rows]
    assert torch.allclose(logits, torch.cat(alone, 1), atol=1e-3)

"""TRL's own trainers on converted models: what docs/clients.md says, and what each sees of a document."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import InPlaceTTTCallback, InPlaceTTTConfig, Session, convert
from inplace_ttt.cli import main
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.surgery import fast_weights

pytest.importorskip("trl", reason="TRL is not installed here; `make test-clients` does it")

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
COMMON: dict[str, Any] = {
    "max_steps": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_steps": 2,
}
RATES: dict[str, Any] = {"conv_learning_rate": 1e-2, "proj_learning_rate": 1e-2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tiny.save_converted(tiny.save_base(tmp_path / "base"), tmp_path / "converted")


def lines(output: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(output, "log.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


def trained(trainer: Any, **settings: Any) -> list[dict[str, Any]]:
    """Its log's lines, once it has trained with writes that reach the loss, and conv and P have moved by
    their own rates."""
    before = {
        i: (layer.ttt.conv.detach().clone(), layer.ttt.proj.detach().clone())
        for i, layer in fast_weights(trainer.model).items()
    }
    InPlaceTTTCallback(**RATES, **settings).attach(trainer)
    trainer.train()
    for index, layer in fast_weights(trainer.model).items():
        for parameter, old in zip((layer.ttt.conv, layer.ttt.proj), before[index], strict=True):
            assert (parameter.detach() - old).abs().max() > 5e-3  # Adam's first steps are about the rate
    found = lines(trainer.args.output_dir)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert all(
        layer["state_ratio"] > 0 and layer["gradients"]["proj"] > 0
        for line in found
        for layer in line["layers"]
    )
    return found


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(tiny.text(words=3000))
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    words = tiny.byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **roles)
    tiny.save_llama(
        Path("smollm2-135m"), words, num_hidden_layers=7, num_attention_heads=2, max_position_embeddings=8192
    )
    namespace: dict[str, Any] = {"__name__": "docs"}
    section = PAGE.read_text().partition("## TRL")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(bash|py)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["bash", "py", "py"]
    for kind, code in blocks:
        if kind == "bash":
            assert main(code.split()[1:]) == 0
        else:
            exec(compile(code, str(PAGE), "exec"), namespace)
    assert len(lines("sft")) == len(lines("dpo")) == 4
    model = AutoModelForCausalLM.from_pretrained("sft-ttt")
    assert all(layer.ttt.conv.abs().max() > 0 for layer in fast_weights(model).values())
    ids = namespace["tokenizer"](tiny.text(40), return_tensors="pt").input_ids
    assert Session(model).generate(ids, max_new_tokens=3, do_sample=False).numel() > 0


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_sft_reads_each_document_alone(folder: Path, packing: bool) -> None:
    """The first step's loss is that of the documents one by one, padded and packed; and a stopped run goes
    on."""
    texts = [{"text": tiny.text(60 + 20 * i, seed=i)} for i in range(4)]

    def sft(steps: int) -> Any:
        args = SFTConfig(
            "out",
            packing=packing,
            max_length=2048,
            per_device_train_batch_size=4,
            bf16=False,
            **{**COMMON, "max_steps": steps},
        )
        model = AutoModelForCausalLM.from_pretrained(folder)
        return SFTTrainer(
            model,
            args=args,
            train_dataset=Dataset.from_list(texts),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    losses, counts = [], []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text["text"]).input_ids, tokenizer.eos_token_id]])
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss.item())
        counts.append(ids.shape[1] - 1)
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert trained(sft(3))[0]["loss"] == pytest.approx(expected, rel=1e-4)
    resumed = sft(5)
    InPlaceTTTCallback(**RATES, eta_warmup_steps=4).attach(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert [line["step"] for line in lines("out")] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(line["loss"]) for line in lines("out"))


def test_dpo_starts_from_its_reference(folder: Path) -> None:
    """The reference has the fast weights too: before the first step neither answer is preferred."""
    pairs = [
        {
            "prompt": tiny.text(60, seed=i),
            "chosen": " " + tiny.text(30, seed=i + 50),
            "rejected": " " + tiny.text(30, seed=i + 90),
        }
        for i in range(8)
    ]
    args = DPOConfig("out", per_device_train_batch_size=2, bf16=False, **COMMON)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = DPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    assert fast_weights(trainer.ref_model).keys() == fast_weights(trainer.model).keys()
    assert trained(trainer)[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_grpo_trains_what_it_generates(folder: Path) -> None:
    prompts = [{"prompt": tiny.text(60, seed=i)} for i in range(8)]
    args = GRPOConfig(
        "out",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=24,
        bf16=False,
        **COMMON,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **_: [
            float(text.count("e")) + len(text) / 100 for text in completions
        ],
        args=args,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trained(trainer)


def test_a_trainer_whose_optimizer_is_made_elsewhere_is_refused(folder: Path) -> None:
    model = convert(
        AutoModelForCausalLM.from_pretrained(folder.parent / "base"),
        InPlaceTTTConfig(layers=(0,), chunk_size=16),
    )
    trainer = SFTTrainer(
        model,
        args=SFTConfig("out", bf16=False, **COMMON),
        train_dataset=Dataset.from_list([{"text": tiny.text(60)}] * 8),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[InPlaceTTTCallback(**RATES)],
    )
    with pytest.raises(
        InPlaceTTTError,
        match="conv_learning_rate does nothing, since the trainer made its optimizer without it",
    ):
        trainer.train()

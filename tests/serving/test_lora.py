"""Exported sessions in vLLM: plain checkpoints and LoRA adapters answer as the sessions do, two adapters at once."""

from __future__ import annotations

from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from serving.checkpoints import base
from serving.test_gradient import QUESTIONS, expected, save
from serving.test_tokens import GREEDY, engine, served

RANK = 128
"""The model's width, so that nothing is left out."""


def lora(number: int, folder: Path) -> LoRARequest:
    return LoRARequest(f"book{number}", number + 1, str(folder))


def answers(made: LLMEngine) -> dict[str, list[int]]:
    """What the engine generates for all its requests, by their names."""
    found: dict[str, list[int]] = {}
    while made.has_unfinished_requests():
        for output in made.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    return found


def test_two_adapters_at_once(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path / "base")
    model = save(tmp_path / "ttt")
    states, wanted = expected(model)
    for number in (0, 1):
        states[number].to_lora(tmp_path / f"lora{number}", rank=RANK, base=str(tmp_path / "base"))
    with engine(tmp_path / "base", enable_lora=True, max_lora_rank=RANK, max_loras=2) as made:
        for q, question in enumerate(QUESTIONS):
            made.add_request(f"none/{q}", {"prompt_token_ids": question}, GREEDY)
        # apart: on a CPU, vLLM 0.32 gives requests without an adapter the last adapter of their batch
        found = answers(made)
        for q, question in enumerate(QUESTIONS):
            prompt = {"prompt_token_ids": question}
            for number in (0, 1):
                adapter = lora(number, tmp_path / f"lora{number}")
                made.add_request(f"{number}/{q}", prompt, GREEDY, lora_request=adapter)
        found |= answers(made)
    assert found == {name: wanted[name] for name in found} and len(found) == 3 * len(QUESTIONS)


def test_a_plain_checkpoint(tmp_path: Path) -> None:
    model = save(tmp_path / "ttt")
    states, wanted = expected(model)
    states[0].bake().save_pretrained(tmp_path / "plain")
    with engine(tmp_path / "plain") as made:
        found = served(made, QUESTIONS)
    assert [found[q] for q in range(len(QUESTIONS))] == [wanted[f"0/{q}"] for q in range(len(QUESTIONS))]

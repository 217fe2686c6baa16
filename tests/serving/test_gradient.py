"""Models with `target: gradient` in vLLM: memories that transformers wrote are read, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, Session, calibrate, convert, disable_ttt
from inplace_ttt.surgery import fast_weights
from serving.checkpoints import base, save_tokenizer, words
from serving.servers import VLLM, Server, running
from serving.test_http import call
from serving.test_memories import after, answers, ask, continued, params, rpc
from serving.test_tokens import NEW, engine, prompts

CHUNK = 128
"""Longer than a question and its answer, so that a session writes nothing while it answers."""
BOOKS = prompts(300, 150, 40, seed=5)
QUESTIONS = prompts(20, 60, seed=6)
RULES: dict[str, dict[str, Any]] = {
    "sum": {},
    "ridge": {"update_rule": "ridge", "ridge": 0.5, "whitening": {"rank": 0.5}},
}


def save(path: Path, rule: str = "sum") -> PreTrainedModel:
    config = {"layers": (1, 3), "chunk_size": CHUNK, "target": "gradient", "eta": 3.0, **RULES[rule]}
    model = convert(base("llama"), InPlaceTTTConfig(**config))
    calibrate(model, [torch.randint(3, 512, (1, 512), generator=torch.Generator().manual_seed(1))])
    model.save_pretrained(path)
    return model


def expected(model: PreTrainedModel) -> tuple[list[Session], dict[str, list[int]]]:
    """Sessions that have read the books, and the answers of each, and of the base."""
    states = [after(model, book) for book in BOOKS]
    found = {
        f"{b}/{q}": continued(model, state, question)
        for b, state in enumerate(states)
        for q, question in enumerate(QUESTIONS)
    }
    with disable_ttt(model):
        found |= {
            f"none/{q}": continued(model, Session(model), question) for q, question in enumerate(QUESTIONS)
        }
    assert len({tuple(found[f"{b}/1"]) for b in (0, 1, "none")}) == 3, "each memory gives another answer"
    assert found["2/1"] == found["none/1"], "a book of less than a chunk writes nothing"
    return states, found


@pytest.mark.parametrize("rule", RULES)
def test_memories_of_sessions_are_read(rule: str, tmp_path: Path) -> None:
    """Several in one batch, under preemption and prefix caching; a second time, from cached prefixes."""
    model = save(tmp_path / "ttt", rule)
    states, wanted = expected(model)
    for b, state in enumerate(states):
        state.save(tmp_path / f"{b}.state")
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 5}
    with engine(tmp_path / "ttt", enable_prefix_caching=True, **settings) as made:
        for b in range(len(BOOKS)):
            assert (
                rpc(made, "ttt_load", f"book{b}", str(tmp_path / f"{b}.state"))["chunks"]
                == len(BOOKS[b]) // CHUNK
            )
        for _ in range(2):
            for q, question in enumerate(QUESTIONS):
                ask(made, f"none/{q}", question, params())
                for b in range(len(BOOKS)):
                    ask(made, f"{b}/{q}", question, params(start=f"book{b}"), f"book{b}")
            assert answers(made, resets=(3,)) == wanted


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gradient")


@pytest.fixture(scope="module")
def model(place: Path) -> PreTrainedModel:
    made = save(place / "ttt")
    save_tokenizer(place / "ttt")
    return made


@pytest.fixture(scope="module")
def server(place: Path, model: PreTrainedModel) -> Iterator[Server]:
    with running(place, "inplace_ttt.cli", "serve", str(place / "ttt"), behind=("--vllm", *VLLM)) as made:
        yield made


def test_over_http_a_file_is_a_memory_to_read(server: Server, model: PreTrainedModel, place: Path) -> None:
    states, wanted = expected(model)
    states[0].save(place / "book.state")
    assert call(server, "PUT", "/v1/memories/book/file", (place / "book.state").read_bytes())[0] == 200
    request = {
        "model": str(place / "ttt"),
        "prompt": QUESTIONS[1],
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
    }
    for given, answer in (
        ({"memory": "book", "freeze": True}, "0/1"),
        ({}, "none/1"),
        ({"ttt": "off"}, "none/1"),
    ):
        status, found = call(server, "POST", "/v1/completions", {**request, **given})
        assert (status, found["choices"][0]["text"].split()) == (200, words(wanted[answer]).split()), given
    status, error = call(server, "POST", "/v1/completions", {**request, "memory": "book"})
    assert (
        status == 400
        and "upload the session's file to /v1/memories/NAME/file, and set freeze" in error["error"]["message"]
    )
    assert "requests read memories and write none" in server.log.read_text()
    assert {layer.fast.config.target for layer in fast_weights(model).values()} == {"gradient"}

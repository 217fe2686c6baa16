"""`inplace-ttt chat ADDRESS`: a terminal chat with a running server. `Session` gives the right answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli.chatting import Chats
from transformers import AutoTokenizer, PreTrainedModel

import inplace_ttt
from inplace_ttt import Session, disable_ttt
from serving.checkpoints import save, save_tokenizer, words
from serving.servers import VLLM, Server, running
from serving.test_memories import after
from serving.test_tokens import prompts

KEY = "alice"
LONG, SHORT = prompts(3000, 90, seed=21)
QUESTIONS = [words(ids) for ids in prompts(12, 30, 25, seed=22)]
NEW = 6
PIECE = 2047
"""The server's longest prompt that leaves room for a token."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save(folder / "ttt", "llama", "ridge")
    save_tokenizer(folder / "ttt")
    (folder / "long.txt").write_text(words(LONG))
    (folder / "short.txt").write_text(words(SHORT))
    return folder


@pytest.fixture(scope="module")
def model(place: Path) -> PreTrainedModel:
    return inplace_ttt.load(place / "ttt")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    ours = ("serve", str(place / "ttt"), "--api-key", KEY, "--memories", "memories")
    with running(place, "inplace_ttt.cli", *ours, behind=("--vllm", *VLLM)) as server:
        yield server


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Path) -> Chats:
    monkeypatch.chdir(place)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return Chats(monkeypatch, capsys)


def expected(model: PreTrainedModel, place: Path, state: Session | None, *turns: str) -> str:
    """The answer to turns in a conversation, under a session's fast weights."""
    tokenizer = AutoTokenizer.from_pretrained(place / "ttt")
    messages = [{"role": "user", "content": turn} for turn in turns]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True).input_ids
    session = Session(model) if state is None else state.fork().drop_kv_cache()
    new = session.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=2)
    return str(tokenizer.decode(new[0], skip_special_tokens=True)).strip()


def test_it_reads_in_pieces_and_answers_as_a_session(
    server: Server, chats: Chats, model: PreTrainedModel, place: Path
) -> None:
    how = (server.address, "--memory", "book", "--max-new-tokens", NEW)
    first, second, *_ = QUESTIONS
    lines = ("/read long.txt", first, second, "/drop", second, "/off", second, "/on", second, "/save b.state")
    answers = chats.answers(*how, lines=lines)
    state = after(model, LONG[:PIECE]).drop_kv_cache()
    state = after(model, LONG[PIECE:], state).drop_kv_cache()
    one = expected(model, place, state, first)
    alone = expected(model, place, state, second)
    with disable_ttt(model):
        off = expected(model, place, None, second)
    # off goes on in a copy of the conversation, which holds one turn after the drop
    with disable_ttt(model):
        off = expected(model, place, None, second, alone, second)
    assert answers == [
        one,
        expected(model, place, state, first, one, second),
        alone,
        off,
        expected(model, place, state, second, alone, second),
    ]
    assert len(set(answers)) > 2
    saved = Session.load(place / "b.state", model)
    assert saved.chunks_written == state.chunks_written > 90
    assert expected(model, place, saved, first) == one


def test_the_memory_stays_on_the_server(server: Server, chats: Chats, place: Path) -> None:
    """It is forked, saved, asked in another chat with an address that ends in /v1, and forgotten."""
    lines = ("/read short.txt", "/fork branch", "/save", "/forget", "/info", QUESTIONS[0])
    out, notes = chats.run(server.address, "--memory", "kept", "--max-new-tokens", 3, lines=lines)
    assert "read 90 tokens of short.txt, wrote 2 chunks" in notes
    assert "\nsaved\n" in notes and "memory kept is empty" in notes
    out, notes = chats.run(f"{server.address}/v1/", "--memory", "branch", "--json", lines=("/info",))
    found = json.loads(out)
    assert (found["tokens"], found["chunks_written"], found["memory"]) == (90, 2, "branch")
    assert found["state_bytes"] > 0
    assert "memory branch: 90 tokens, 2 chunks written" in notes


def test_a_refusal_is_a_sentence_and_the_chat_goes_on(server: Server, chats: Chats) -> None:
    lines = (
        "/read short.txt",
        "/save",
        "/fork b",
        "w7 " * 2100,
        "/off",
        "/read short.txt",
        "/on",
        QUESTIONS[0],
    )
    out, notes = chats.run(server.address, "--max-new-tokens", 3, "--json", lines=lines)
    assert "short.txt needs a memory to be read into; start the chat with --memory NAME." in notes
    assert notes.count("this chat does not have a memory; start it with --memory NAME.") == 2
    assert "refused POST /v1/chat/completions" in notes and "2048" in notes
    assert [turn["question"] for turn in json.loads(out)["answers"]] == [QUESTIONS[0]]
    _, notes = chats.run(server.address, "--memory", "no/name", code=2)
    assert "no/name" in notes and "Traceback" not in notes
    _, notes = chats.run(server.address, "--memory", "m", lines=("/off", "/read short.txt", "/on", "/save"))
    assert "TTT is off, so short.txt cannot be read into the memory; give /on first." in notes
    assert "memory m is empty; /read a file first." in notes


def test_a_wrong_address_or_key_is_refused(server: Server, chats: Chats) -> None:
    _, notes = chats.run(server.address, "--api-key", "mallory", code=2)
    assert "give the server's key with --api-key." in notes
    for address in ("http://127.0.0.1:9", "http://127.0.0.1:port", "http://", "https://127.0.0.1:9"):
        _, notes = chats.run(address, code=2)
        assert f"cannot reach the server at {address.rstrip('/')}" in notes and "Traceback" not in notes
    with other_server() as address:
        _, notes = chats.run(address, code=2)
    assert "did not answer with JSON; give the address of `inplace-ttt serve`." in notes


class other_server:
    """A web server that is not ours: it answers everything with a page."""

    def __enter__(self) -> str:
        class Pages(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"<html>hello</html>")

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Pages)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()

"""`inplace-ttt serve`: memories by name, asked by OpenAI's client and by hand. `Session` says what is
right."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APITimeoutError, BadRequestError
from transformers import PreTrainedModel

import inplace_ttt
from inplace_ttt import Session, disable_ttt
from serving.bad_requests import bad_requests
from serving.checkpoints import save, save_tokenizer, words
from serving.http_texts import BOOKS, QUESTIONS
from serving.servers import VLLM, Server, running, said
from serving.test_memories import after, continued
from serving.test_tokens import NEW, generated

KEYS = ("alice", "bob")
SIZE = 100_000
"""Bytes; fewer than two memories of this model take."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("http")
    save(folder / "ttt", "llama", "ridge")
    save_tokenizer(folder / "ttt")
    return folder


@pytest.fixture(scope="module")
def model(place: Path) -> PreTrainedModel:
    return inplace_ttt.load(place / "ttt")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    with served(place) as running_server:
        yield running_server


def served(place: Path, memories: str = "memories") -> Any:
    keys = [word for key in KEYS for word in ("--api-key", key)]
    limits = ("--memories", memories, "--memory-bytes", str(SIZE), "--per-key", "6")
    return running(
        place, "inplace_ttt.cli", "serve", str(place / "ttt"), *keys, *limits, behind=("--vllm", *VLLM)
    )


def call(server: Server, method: str, path: str, body: Any = None, key: str = KEYS[0]) -> tuple[int, Any]:
    """Status and JSON of a request by hand."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(
        f"{server.address}{path}", data, {**headers, "Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            content = response.read()
            return response.status, json.loads(content) if response.headers[
                "content-type"
            ] == "application/json" else content
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def names(server: Server, key: str = KEYS[0]) -> list[str]:
    return [memory["name"] for memory in call(server, "GET", "/v1/memories", key=key)[1]["data"]]


@pytest.fixture
def clean(server: Server) -> None:
    for key in KEYS:
        for name in names(server, key):
            call(server, "DELETE", f"/v1/memories/{name}", key=key)


@pytest.mark.usefixtures("clean")
def test_a_memory_by_name(server: Server, place: Path, model: PreTrainedModel) -> None:
    """Read once, asked often, written on; forked, saved, gone back to; the same file as a session's."""
    ask, folder = server.client(KEYS[0]), place / "ttt"
    said(ask, folder, BOOKS[0], 1, memory="book")
    state = after(model, BOOKS[0])
    for question in QUESTIONS:
        assert said(ask, folder, question, memory="book", freeze=True) == continued(model, state, question)
        assert said(ask, folder, question) == generated(model, question)
        with disable_ttt(model):
            assert said(ask, folder, question, ttt="off") == generated(model, question)
    assert call(server, "POST", "/v1/memories/book/fork", {"to": "branch"})[1]["tokens"] == len(BOOKS[0])
    answer = said(ask, folder, QUESTIONS[2], memory="branch")
    later = after(model, [*QUESTIONS[2], *answer[:-1]], state.fork())
    assert said(ask, folder, QUESTIONS[3], memory="branch", freeze=True) == continued(
        model, later, QUESTIONS[3]
    )
    assert said(ask, folder, QUESTIONS[3], memory="book", freeze=True) == continued(
        model, state, QUESTIONS[3]
    )
    status, file = call(server, "GET", "/v1/memories/branch/file")
    assert status == 200
    (place / "branch.state").write_bytes(file)
    loaded = Session.load(place / "branch.state", model)
    assert continued(model, loaded, QUESTIONS[0]) == continued(model, later, QUESTIONS[0])
    assert call(server, "POST", "/v1/memories/branch/save")[1]["saved"] is True
    said(ask, folder, BOOKS[1], 1, memory="branch")
    assert call(server, "GET", "/v1/memories/branch")[1]["saved"] is False
    assert (
        call(server, "POST", "/v1/memories/branch/load")[1]["tokens"]
        == len(BOOKS[0]) + len(QUESTIONS[2]) + NEW - 1
    )
    assert said(ask, folder, QUESTIONS[0], memory="branch", freeze=True) == continued(
        model, later, QUESTIONS[0]
    )
    after(model, BOOKS[2]).save(place / "own.state")
    assert call(server, "PUT", "/v1/memories/mine/file", (place / "own.state").read_bytes())[0] == 200
    assert said(ask, folder, QUESTIONS[1], memory="mine", freeze=True) == continued(
        model, after(model, BOOKS[2]), QUESTIONS[1]
    )
    chat = ask.chat.completions.create(
        model=str(folder), messages=[{"role": "user", "content": words(QUESTIONS[1])}], temperature=0, max_tokens=NEW,
        extra_body={"memory": "mine", "freeze": True, "ignore_eos": True},
    )  # fmt: skip
    assert (
        chat.choices[0].message.content.split()
        == words(continued(model, after(model, BOOKS[2]), QUESTIONS[1])).split()
    )
    assert names(server) == ["book", "branch", "mine"] and names(server, KEYS[1]) == []
    assert call(server, "DELETE", "/v1/memories/book")[0] == 200 and names(server) == ["branch", "mine"]


@pytest.mark.usefixtures("clean")
def test_two_secrets_never_meet(server: Server, place: Path, model: PreTrainedModel) -> None:
    """200 requests at once of two keys whose memories have one name, with requests that have none: each gets
    its own answer."""
    folder = place / "ttt"
    for key, book in zip(KEYS, BOOKS, strict=False):
        said(server.client(key), folder, book, 1, memory="secret")
    expected = {(None, q): generated(model, question) for q, question in enumerate(QUESTIONS)}
    for key, book in zip(KEYS, BOOKS, strict=False):
        expected |= {
            (key, q): continued(model, after(model, book), question) for q, question in enumerate(QUESTIONS)
        }
    assert all(len({tuple(expected[key, q]) for key in (None, *KEYS)}) == 3 for q in (2, 3)), (
        "what is remembered shows"
    )
    drawn = random.Random(0)
    wanted = [(drawn.choice([None, *KEYS]), drawn.randrange(4)) for _ in range(200)]

    def one(asked: tuple[str | None, int]) -> bool:
        key, q = asked
        ours = {} if key is None else {"memory": "secret", "freeze": True}
        return said(server.client(key or KEYS[0]), folder, QUESTIONS[q], **ours) == expected[asked]

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(one, wanted))


@pytest.mark.usefixtures("clean")
def test_requests_that_write_one_memory_wait_for_each_other(
    server: Server, place: Path, model: PreTrainedModel
) -> None:
    """None is lost, and what they leave is what they would have left in some order; one that is cut off
    leaves nothing."""
    folder = place / "ttt"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda book: said(server.client(KEYS[0]), folder, book, 1, memory="all"), BOOKS))
    assert call(server, "GET", "/v1/memories/all")[1]["tokens"] == sum(map(len, BOOKS))
    stream = server.client(KEYS[0]).completions.create(
        model=str(folder), prompt=BOOKS[0], max_tokens=1000, stream=True,
        extra_body={"memory": "all", "ignore_eos": True, "detokenize": False},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    with pytest.raises(APITimeoutError):
        said(server.client(KEYS[0]).with_options(timeout=0.5), folder, BOOKS[0], 1500, memory="all")
    parts = server.client(KEYS[0]).completions.create(
        model=str(folder), prompt=BOOKS[1], max_tokens=5, stream=True,
        extra_body={"memory": "all", "ignore_eos": True, "detokenize": False},
    )  # fmt: skip
    list(parts)
    assert call(server, "GET", "/v1/memories/all")[1]["tokens"] == sum(map(len, BOOKS)) + len(BOOKS[1]) + 4


@pytest.mark.usefixtures("clean")
def test_who_hangs_up_after_the_last_event_finds_it_in_the_memory(server: Server, place: Path) -> None:
    """OpenAI's clients do, as soon as [DONE] has come."""
    asked = {
        "model": str(place / "ttt"),
        "prompt": BOOKS[0],
        "max_tokens": 2,
        "stream": True,
        "memory": "hung-up",
        "ignore_eos": True,
    }
    for times in (1, 2, 3):
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as line:
            body = json.dumps(asked).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            heard = b""
            while b"data: [DONE]" not in heard:
                heard += line.recv(4096)
        assert call(server, "GET", "/v1/memories/hung-up")[1]["tokens"] == times * (len(BOOKS[0]) + 1)


@pytest.mark.usefixtures("clean")
def test_bad_requests_get_a_sentence_and_the_server_goes_on(
    server: Server, place: Path, model: PreTrainedModel
) -> None:
    folder, ask = place / "ttt", server.client(KEYS[0])
    said(ask, folder, BOOKS[0], 1, memory="book")
    state = after(model, BOOKS[0])
    state.save(place / "fine.state")
    odd, count = [], 0
    for method, path, body in bad_requests(place, model):
        status, answer = call(server, method, path, body)
        count += 1
        message = (
            answer["error"]["message"]
            if isinstance(answer, dict) and isinstance(answer.get("error"), dict)
            else None
        )
        if not (400 <= status < 500 and message and "Traceback" not in message) and not (
            status in (404, 405) and "detail" in answer
        ):
            odd.append((method, path, body if not isinstance(body, bytes) else body[:40], status, answer))
    assert odd == [] and count >= 100
    for key in ("", "mallory"):
        assert call(server, "GET", "/v1/memories", key=key)[0] == 401
        assert (
            call(
                server,
                "POST",
                "/v1/completions",
                {"model": str(folder), "prompt": [5], "memory": "book"},
                key=key,
            )[0]
            == 401
        )
    assert call(server, "GET", "/v1/memories/book", key=KEYS[1])[0] == 404
    with pytest.raises(BadRequestError, match="freeze does nothing without a memory"):
        said(ask, folder, QUESTIONS[0], freeze=True)
    assert said(ask, folder, QUESTIONS[3], memory="book", freeze=True) == continued(
        model, state, QUESTIONS[3]
    )
    assert names(server) == ["book"]
    for number in range(5):
        said(ask, folder, QUESTIONS[0], 1, memory=f"m{number}")
    assert (
        call(server, "POST", "/v1/completions", {"model": str(folder), "prompt": [5], "memory": "one-more"})[
            0
        ]
        == 409
    )


def test_kill_9_during_a_save(place: Path, model: PreTrainedModel) -> None:
    """What a file held before is there, or what it was to hold; and the next server has it."""
    folder, states = place / "ttt", {}
    with served(place, "killed") as server:
        ask = server.client(KEYS[1])
        said(ask, folder, BOOKS[0], 1, memory="killed")
        states[len(BOOKS[0])] = after(model, BOOKS[0])
        assert call(server, "POST", "/v1/memories/killed/save", key=KEYS[1])[0] == 200
        said(ask, folder, BOOKS[1], 1, memory="killed")
        states[len(BOOKS[0]) + len(BOOKS[1])] = after(model, BOOKS[1], states[len(BOOKS[0])].fork())
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(call, server, "POST", "/v1/memories/killed/save", None, KEYS[1])
            time.sleep(0.005)
            os.killpg(server.process.pid, signal.SIGKILL)
            saving.exception(30)
    with served(place, "killed") as server:
        tokens = call(server, "GET", "/v1/memories/killed", key=KEYS[1])[1]["tokens"]
        answer = said(server.client(KEYS[1]), folder, QUESTIONS[2], memory="killed", freeze=True)
        assert answer == continued(model, states[tokens], QUESTIONS[2])


def test_a_server_that_cannot_be_says_why(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            "cannot listen at": ("--port", port),
            "cannot write": ("--memories", str(place / "ttt" / "config.json" / "x")),
            "leave --api-server-count out": ("--vllm", "--api-server-count", "2"),
        }
        for said_so, arguments in cases.items():
            command = [sys.executable, "-m", "inplace_ttt.cli", "serve", str(place / "ttt"), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr, done.stderr[
                -2000:
            ]
            assert said_so in done.stderr.splitlines()[-1]

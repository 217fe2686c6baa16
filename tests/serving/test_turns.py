"""The server's side of memories without a model: requests that come at once, a disk that is full, what vLLM's
endpoints leave out."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.locks import output_lock
from inplace_ttt.serving import benchmark, server
from inplace_ttt.serving.asked import Asked
from inplace_ttt.serving.http import RequestsWithMemory
from inplace_ttt.serving.memories import Memories
from inplace_ttt.serving.memory import Refused
from inplace_ttt.serving.memory_settings import MemorySettings


class Engine:
    """Snapshots are numbers, each 100 bytes. full: its disk takes nothing. slow: the next call of that name
    waits for the event."""

    def __init__(self) -> None:
        self.snapshots: dict[str, str] = {}
        self.generate: Any = None
        self.made, self.full, self.slow = 0, False, dict[str, asyncio.Event]()

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        read = Path(args[1]).read_text() if method == "ttt_load" else ""
        if method in self.slow:
            await self.slow.pop(method).wait()
        match method:
            case "ttt_keep":
                self.made += 1
                self.snapshots[args[0]] = str(self.made)
            case "ttt_load":
                self.snapshots[args[0]] = read
            case "ttt_save" if self.full:
                return [{"error": "cannot write: no space"}]
            case "ttt_save":
                Path(args[1]).write_text(self.snapshots[args[0]])
            case "ttt_drop":
                del self.snapshots[args[0]]
        return [{"tokens": 1, "chunks": 0, "bytes": 100}]


async def write(memories: Memories, *names: str) -> None:
    for name in names:
        await memories.end(await memories.begin("user", name, freeze=False), well=True)


async def at_once(*calls: Coroutine[Any, Any, Any], before: asyncio.Event) -> list[Any]:
    """What they give; the event is set when all have come as far as they do without it."""
    tasks = [asyncio.create_task(call) for call in calls]
    for _ in range(20):
        await asyncio.sleep(0)
    before.set()
    return await asyncio.gather(*tasks)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def memories(engine: Engine, tmp_path: Path) -> Memories:
    return Memories(engine, MemorySettings(str(tmp_path / "memories"), in_memory=150))


def test_what_is_loaded_while_a_request_wakes_the_memory_stays(engine: Engine, memories: Memories) -> None:
    async def run() -> None:
        await write(memories, "a")
        await memories.save("user", "a")
        await write(memories, "a", "b")
        assert memories.describe(memories.find("user", "a"))["in"] == "disk"
        engine.slow["ttt_load"] = woken = asyncio.Event()
        turn, loaded = await at_once(
            memories.begin("user", "a", freeze=True), memories.load("user", "a"), before=woken
        )
        assert engine.snapshots[turn.start] == "2"
        turn = await memories.begin("user", "a", freeze=True)
        assert engine.snapshots[turn.start] == loaded.file.read_text() == "1"

    asyncio.run(run())


def test_what_is_deleted_while_a_request_wakes_the_memory_goes(engine: Engine, memories: Memories) -> None:
    async def run() -> None:
        await write(memories, "a", "b")
        engine.slow["ttt_load"] = woken = asyncio.Event()
        turn, _ = await at_once(
            memories.begin("user", "a", freeze=True), memories.delete("user", "a"), before=woken
        )
        await memories.end(turn, well=True)
        await memories.delete("user", "b")
        assert engine.snapshots == {} and memories.all_of("user") == []

    asyncio.run(run())


def test_a_full_disk_fails_the_next_request_that_would_write_and_none_that_has(
    engine: Engine, memories: Memories
) -> None:
    async def run() -> None:
        await write(memories, "a")
        engine.full = True
        await write(memories, "b")
        assert [memory["in"] for memory in memories.all_of("user")] == ["memory", "memory"]
        with pytest.raises(Refused, match="no space") as caught:
            await memories.begin("user", "b", freeze=False)
        assert caught.value.status == 507
        await memories.end(await memories.begin("user", "b", freeze=True), well=True)
        engine.full = False
        await write(memories, "b")
        assert [memory["in"] for memory in memories.all_of("user")] == ["disk", "memory"]

    asyncio.run(run())


def asked(memories: Memories, path: str, values: dict[str, Any], *events: bytes) -> tuple[int, bytes]:
    """Status and body of a request to an endpoint that answers with these events."""
    sent: list[Any] = []

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(values).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(ttt_memories=memories))
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "app": app}
    asyncio.run(RequestsWithMemory(endpoint)(scope, receive, send))
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


@pytest.mark.parametrize(
    "events", [(b"data: 1\n\n",), (b"data: 1\n\n", b'data: {"error": {"code": 500}}\n\n')]
)
def test_a_stream_that_ends_in_an_error_leaves_nothing(
    events: tuple[bytes, ...], engine: Engine, memories: Memories
) -> None:
    done = b"data: [DONE]\n\n"
    assert asked(memories, "/v1/completions", {"memory": "a", "stream": True}, *events, done) == (
        200,
        b"".join((*events, done)),
    )
    assert engine.made == (1 if len(events) == 1 else 0)


@pytest.mark.parametrize("ours", [{"memory": "a"}, {"memory": "a", "freeze": True}, {"ttt": "off"}])
def test_what_vllm_would_pass_over_is_refused(ours: dict[str, Any], memories: Memories) -> None:
    """Its beams are requests without our settings; its other endpoints know no settings of ours."""
    asyncio.run(write(memories, "a"))
    status, body = asked(memories, "/v1/completions", {**ours, "use_beam_search": True})
    assert status == 400 and b"beam search supports neither memory nor ttt" in body
    for path in (
        "/v1/chat/completions/batch",
        "/invocations",
        "/inference/v1/generate",
        "/v1/responses",
        "/v1/messages",
    ):
        status, body = asked(memories, path, ours)
        assert status == 400 and b"work only in /v1/completions" in body, path


def test_settings_of_the_engine_are_no_request_s(memories: Memories) -> None:
    given = {"inplace_ttt": '{"off": true, "salted": true}'}
    for values in ({"vllm_xargs": given}, {"sampling_params": {"extra_args": given}}):
        assert asked(memories, "/inference/v1/generate", values)[0] == 400


def test_no_request_says_the_salt_of_those_without_ttt() -> None:
    """Else what it makes of a prefix would be theirs."""
    salts = {
        Asked.of({"ttt": "off"}).told({"cache_salt": salt}, None)["cache_salt"] for salt in (None, "", "mine")
    }
    assert len(salts) == 2 and not any(salt.endswith("off") for salt in salts)


def test_what_was_saved_last_counts_where_a_kill_left_what_rested_before(
    engine: Engine, memories: Memories
) -> None:
    (memories.folder / "user").mkdir()
    for name, held, at in (
        ("a.resting", "1", 1),
        ("a.state", "2", 2),
        ("b.state", "3", 1),
        ("b.resting", "4", 2),
    ):
        (memories.folder / "user" / name).write_text(held)
        os.utime(memories.folder / "user" / name, ns=(at, at))
    assert [memory["saved"] for memory in memories.all_of("user")] == [True, False]
    turns = [asyncio.run(memories.begin("user", name, freeze=True)) for name in ("a", "b")]
    assert [engine.snapshots[turn.start] for turn in turns if turn.start is not None] == ["2", "4"]


def test_downloads_that_a_kill_cut_off_go(engine: Engine, memories: Memories) -> None:
    asyncio.run(write(memories, "a"))
    left = asyncio.run(memories.export("user", "a"))
    assert left.exists()
    Memories(engine, memories.settings)
    assert not left.exists()


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--max-num-seqs", "x"], "invalid int value"),
        (["--additional-config", "{"], "must be a JSON object"),
        (["--config", "/no/such.yaml"], "cannot use the arguments after --vllm"),
        (["--model", "other"], "--model is an argument of inplace-ttt serve itself"),
        (["other"], "--model is an argument of inplace-ttt serve itself"),
        (["--port", "3"], "--port is an argument of inplace-ttt serve itself"),
    ],
)
def test_arguments_of_vllm(
    others: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "cli_env_setup", lambda: None)
    with pytest.raises(InPlaceTTTError, match=message):
        server.serve("model", "127.0.0.1", 1, [], {"folder": str(tmp_path)}, others)


def ends_at_once(pipe: Any, path: str, load: Any) -> None:
    pipe.send({})


def test_a_contender_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")  # which imports nothing again
    monkeypatch.setattr(benchmark, "get_context", lambda method: fork)
    load = benchmark.Load(requests=(1,), prompt=1, new=1, dtype="float32", rounds=1)
    with benchmark._contenders({"base": (ends_at_once, "")}, load) as ask:
        multiprocessing.active_children()[0].join(30)
        with pytest.raises(InPlaceTTTError, match="the process of base has ended"):
            ask("base", (1, 1))


def test_what_ends_vllm_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(coroutine: Any) -> None:
        coroutine.close()
        raise RuntimeError("Engine core initialization failed.")

    monkeypatch.setattr(server, "cli_env_setup", lambda: None)
    monkeypatch.setattr(server, "validate_parsed_serve_args", lambda given: None)
    monkeypatch.setattr(server.uvloop, "run", fail)
    with pytest.raises(
        InPlaceTTTError,
        match="vLLM ended with an error: Engine core initialization failed; its output is above",
    ):
        server.serve("model", "127.0.0.1", 1, [], {"folder": str(tmp_path)}, [])


def test_two_servers_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "cli_env_setup", lambda: None)
    with (
        output_lock(tmp_path / "server"),
        pytest.raises(InPlaceTTTError, match="another server keeps its memories in"),
    ):
        server.serve("model", "127.0.0.1", 1, [], {"folder": str(tmp_path)}, [])

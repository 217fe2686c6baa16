"""Memories over HTTP: in requests to vLLM's own endpoints, and under /v1/memories.

A completion request with `"memory": NAME` starts from that memory, and updates it with the tokens that it
reads and generates. With `"freeze": true` it leaves the memory unchanged. With `"ttt": "off"` it neither
reads nor writes fast weights. A memory belongs to the API key of its request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, State
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InPlaceTTTError
from ..files.schema import from_values
from .asked import FIELDS, Asked
from .engine_settings import WORKER, ttt_config
from .memories import Memories
from .memory import SAVED, Refused, check_name
from .memory_settings import MemorySettings, Turn
from .request_settings import KEY
from .vllm_names import EngineClient

SETTINGS = "inplace_ttt_memories"
"""Key in vLLM's `additional_config`, for the fields of `MemorySettings`."""
_WITH_MEMORY = ("/v1/completions", "/v1/chat/completions")
_WITHOUT = (
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
    "/inference/v1/generate",
)
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
"""First bytes of a stream's last event, and of the event of a failed stream."""
_LOG = logging.getLogger(f"vllm.{__name__}")

router = APIRouter(prefix="/v1/memories")


class MemoryEndpoints:
    """The endpoint plugin for vLLM, which loads it only if VLLM_PLUGINS names it."""

    name = "inplace-ttt"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.add_middleware(RequestsWithMemory)
        app.add_exception_handler(InPlaceTTTError, _refusal)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        assert engine_client is not None
        state.ttt_memories = memories_of(engine_client)


def memories_of(engine: EngineClient) -> Memories | InPlaceTTTError:
    """Returns the memories of an engine, or the error that explains why memories are not possible."""
    config = engine.vllm_config
    try:
        if config.parallel_config.worker_extension_cls != WORKER:
            raise InPlaceTTTError(
                "memories work only for converted models, and without another worker extension; use "
                "inplace-ttt convert, and leave --worker-extension-cls out."
            )
        if config.parallel_config.data_parallel_size > 1:
            raise InPlaceTTTError("memories work with one engine; leave --data-parallel-size out.")
        ttt = ttt_config(config)
        return Memories(
            engine,
            from_values(MemorySettings, (config.additional_config or {}).get(SETTINGS, {}), SETTINGS),
            only_reads=ttt is not None and ttt.target == "gradient",
        )
    except InPlaceTTTError as error:
        _LOG.warning("In-Place TTT: no memories over HTTP: %s", error)
        return error


async def _refusal(request: Request, error: Exception) -> Response:
    return refused(error)


def refused(error: Exception) -> JSONResponse:
    """Returns an error's response, in the form of OpenAI's errors; status 400 unless it is a `Refused`."""
    status = error.status if isinstance(error, Refused) else 400
    return JSONResponse(
        {"error": {"message": str(error), "type": "inplace_ttt", "param": None, "code": status}},
        status_code=status,
    )


def user_of(headers: Headers) -> str:
    """Returns the user of a request: a hash of its API key, even if the server does not check keys."""
    return hashlib.sha256(headers.get("authorization", "").partition(" ")[2].strip().encode()).hexdigest()[
        :32
    ]


def _memories(app: Any) -> Memories:
    memories = app.state.ttt_memories
    if isinstance(memories, InPlaceTTTError):
        raise memories
    assert isinstance(memories, Memories)
    return memories


@router.get("")
async def list_memories(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": _memories(request.app).all_of(user_of(request.headers))}


@router.get("/{name}")
async def get_memory(name: str, request: Request) -> dict[str, Any]:
    memories = _memories(request.app)
    return memories.describe(memories.find(user_of(request.headers), name))


@router.post("/{name}/save")
async def save_memory(name: str, request: Request) -> dict[str, Any]:
    memories = _memories(request.app)
    return memories.describe(await memories.save(user_of(request.headers), name))


@router.post("/{name}/load")
async def load_memory(name: str, request: Request) -> dict[str, Any]:
    memories = _memories(request.app)
    return memories.describe(await memories.load(user_of(request.headers), name))


@router.post("/{name}/fork")
async def fork_memory(name: str, request: Request) -> dict[str, Any]:
    memories = _memories(request.app)
    try:
        asked = await request.json()
    except ValueError:
        asked = None
    if not isinstance(asked, dict) or set(asked) != {"to"}:
        raise Refused('the body must be {"to": NAME}, with the name of the copy.', 400)
    return memories.describe(await memories.fork(user_of(request.headers), name, check_name(asked["to"])))


@router.delete("/{name}")
async def delete_memory(name: str, request: Request) -> dict[str, Any]:
    await _memories(request.app).delete(user_of(request.headers), name)
    return {"name": name, "deleted": True}


@router.get("/{name}/file")
async def download_memory(name: str, request: Request) -> Response:
    """Returns a memory's current content as a file, which `Session.load` reads."""
    file = await _memories(request.app).export(user_of(request.headers), name)
    return FileResponse(
        file,
        media_type="application/octet-stream",
        filename=f"{name}{SAVED}",
        background=BackgroundTask(file.unlink),
    )


@router.put("/{name}/file")
async def upload_memory(name: str, request: Request) -> dict[str, Any]:
    """Makes or replaces a memory from a file of `Session.save` with an empty KV cache."""
    memories = _memories(request.app)
    return memories.describe(
        await memories.upload(user_of(request.headers), check_name(name), request.stream())
    )


class RequestsWithMemory:
    """Middleware that translates a request's memory, freeze and ttt into settings of vLLM's request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in (*_WITH_MEMORY, *_WITHOUT):
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        turn: Turn | None = None
        try:
            values = _object(body)
            if KEY in _arguments(values):
                raise Refused(
                    f'{KEY} of vllm_xargs is reserved; set "memory", "freeze" or "ttt" instead.', 400
                )
            if any(name in values for name in FIELDS):
                if path in _WITHOUT:
                    raise Refused(
                        f"memory, freeze and ttt work only in {' and '.join(_WITH_MEMORY)}; use one of them.",
                        400,
                    )
                asked = Asked.of(values)
                if asked.memory is not None:
                    memories = _memories(scope["app"])
                    turn = await memories.begin(user_of(Headers(scope=scope)), asked.memory, asked.freeze)
                body = json.dumps(asked.told(values, turn)).encode()
        except InPlaceTTTError as error:
            await refused(error)(scope, receive, send)
            return
        await _Exchange(self.app, scope, _replayed(body, receive), send, turn).run()


def _object(body: bytes) -> dict[str, Any]:
    """Returns a body's JSON object; empty if it is invalid, since vLLM refuses it itself."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) and isinstance(values.get("vllm_xargs") or {}, dict) else {}


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a request's extra arguments for the engine, from both places where endpoints take them."""
    sampling = values.get("sampling_params")
    given = sampling.get("extra_args") if isinstance(sampling, dict) else None
    return {**(values.get("vllm_xargs") or {}), **(given if isinstance(given, dict) else {})}


async def _body(receive: Receive) -> bytes:
    blocks, more = [], True
    while more:
        message = await receive()
        blocks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(blocks)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that returns the body first, then the client's further messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay


class _Exchange:
    """A request and its response. The end of the response waits until the memory is updated.

    So once a client has its answer, the memory contains it. If the update failed, the client gets an error.
    For the client, a stream ends with the event [DONE], after which it may disconnect.
    """

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, turn: Turn | None) -> None:
        self.app, self.scope, self.receive, self.send, self.turn = app, scope, receive, send, turn
        self.start: Message | None = None
        self.status = 0
        self.client_is_gone = False
        self.has_failed = False

    async def run(self) -> None:
        try:
            scope = {
                **self.scope,
                "headers": [pair for pair in self.scope["headers"] if pair[0] != b"content-length"],
            }
            await self.app(scope, self._heard, self._pass_on if self.turn is not None else self.send)
        finally:
            if self.turn is not None:
                await asyncio.shield(self._end(well=False))

    async def _heard(self) -> Message:
        message = await self.receive()
        self.client_is_gone |= message["type"] == "http.disconnect"
        return message

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start, self.status = message, message["status"]
            return
        body = message.get("body", b"")
        is_end = not message.get("more_body", False) or body.startswith(_DONE)
        self.has_failed |= body.startswith(_ERROR)
        well = self.status == 200 and not (self.client_is_gone or self.has_failed)
        if is_end and self.turn is not None and (error := await asyncio.shield(self._end(well))):
            if self.start is not None:
                await refused(error)(self.scope, self.receive, self.send)
                return
            _LOG.error("In-Place TTT: a memory was not updated: %s", error)
            message = {**message, "body": b"data: " + bytes(refused(error).body) + b"\n\n" + body}
        if self.start is not None:
            await self.send(self.start)
            self.start = None
        await self.send(message)

    async def _end(self, well: bool) -> InPlaceTTTError | None:
        turn, self.turn = self.turn, None
        assert turn is not None
        try:
            await _memories(self.scope["app"]).end(turn, well)
        except InPlaceTTTError as error:
            return error
        return None

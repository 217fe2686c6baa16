"""Calls of the workers' methods, and the files that pass between them and clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from .memory import Refused


class Engine(Protocol):
    """vLLM's `EngineClient`."""

    generate: Any

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...


def make_folder_of(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"the server's folder of memories is not writable: {error.strerror}.", 507) from None


async def receive(body: AsyncIterator[bytes], file: Path, limit: int) -> None:
    size = 0
    with file.open("wb") as written:
        async for block in body:
            size += len(block)
            if size > limit:
                raise Refused(
                    f"the file is larger than {limit:,} bytes, the largest size of an upload.",
                    413,
                )
            written.write(block)


async def call(engine: Engine, method: str, *args: str | int, status: int) -> Mapping[str, int]:
    """Calls a method of all workers, and returns the answer, with `bytes` summed over workers.

    Raises Refused with the message of a worker that failed.
    """
    answers = await engine.collective_rpc(method, args=args)
    for answer in answers:
        if "error" in answer:
            raise Refused(answer["error"], status)
    return {
        name: sum(answer[name] for answer in answers) if name == "bytes" else answers[0][name]
        for name in answers[0]
    }

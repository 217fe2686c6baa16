"""Which user's memory of which name is which snapshot of the workers: the server's side of memories.

A snapshot never changes. A request starts from the one that its memory's name stands for, and makes a new
one; those who started from the old one still read that. Where snapshots would take too much of the workers'
memory, the least recently used rest on disk.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import shown
from ..files.folders import new_file
from .memory import RESTING, SAVED, Memory, Refused, about_file, check_name, check_writable
from .request_settings import KNOWN

_LOG = logging.getLogger(f"vllm.{__name__}")


class Engine(Protocol):
    """vLLM's `EngineClient`."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...


@dataclass(frozen=True)
class MemorySettings:
    """folder: where memories rest that there is no room for, and are saved. per_user: memories of one user.
        in_memory: bytes of all
    snapshots in the workers. upload: bytes of a file.
    """

    folder: str = "memories"
    per_user: int = 64
    in_memory: int = 4 << 30
    upload: int = 1 << 30


@dataclass(eq=False)
class Turn:
    """One request's use of a memory. start: the snapshot that it starts from; keep: under which name what it
    writes is kept, if it is."""

    memory: Memory
    start: str | None
    keep: str | None


class Memories:
    """All users' memories; their files are FOLDER/USER/NAME.state and .resting. Raises InPlaceTTTError for a
    folder that takes none."""

    def __init__(self, engine: Engine, settings: MemorySettings) -> None:
        self.engine, self.settings, self.folder = engine, settings, Path(settings.folder).resolve()
        check_writable(self.folder)
        # what `export` wrote for a server that was killed
        for cut_off in self.folder.glob(f"*/.{'[0-9a-f]' * 32}{SAVED}"):
            cut_off.unlink(missing_ok=True)
        self._users: dict[str, dict[str, Memory]] = {}
        self._about: dict[str, Mapping[str, int]] = {}
        self._uses: Counter[str] = Counter()  # of a snapshot: by names, and by requests that started from it
        self._clock = itertools.count(1)

    def all_of(self, user: str) -> list[dict[str, Any]]:
        """What is known of a user's memories, by name."""
        return [self.describe(memory) for _, memory in sorted(self._of(user).items()) if memory.exists]

    def describe(self, memory: Memory) -> dict[str, Any]:
        if memory.snapshot is not None:
            return {
                "name": memory.name,
                **self._about[memory.snapshot],
                "in": "memory",
                "saved": memory.is_saved,
            }
        return {
            "name": memory.name,
            **about_file(memory.on_disk or memory.file),
            "in": "disk",
            "saved": memory.is_saved,
        }

    def find(self, user: str, name: str) -> Memory:
        memory = self._of(user).get(check_name(name))
        if memory is None or not memory.exists:
            raise _unknown(name)
        return memory

    async def begin(self, user: str, name: str, freeze: bool) -> Turn:
        """A request's turn, which `end` must end. It waits for other requests that write this memory, unless
        it only reads."""
        memory = self.find(user, name) if freeze else await self._own(user, name)
        try:
            start = await (self._woken(memory) if freeze else self._wake(memory))
        except BaseException:
            if not freeze:
                self._release(memory)
            raise
        if start is not None:
            self._uses[start] += 1
        memory.used = next(self._clock)
        keep = None if freeze else uuid.uuid4().hex
        KNOWN.update({keep} if keep is not None else ())
        return Turn(memory, start, keep)

    async def end(self, turn: Turn, well: bool) -> None:
        """Make what the request wrote the memory's, if all went well. Raises InPlaceTTTError where there is
        nothing."""
        KNOWN.discard(turn.keep or "")
        try:
            if turn.keep is not None and well:
                await self._become(turn.memory, await self._made("ttt_keep", turn.keep, status=500))
            elif turn.keep is not None:
                await self.engine.collective_rpc("ttt_forget", args=(turn.keep,))
        finally:
            if turn.keep is not None:
                self._release(turn.memory)
            await self._let_go(turn.start)
        await self._make_room()

    async def save(self, user: str, name: str) -> Memory:
        """Write a memory to its file, in one step."""
        async with self._alone(user, name) as memory:
            if not memory.is_saved:
                await self._write(await self._woken(memory), memory.file)
                memory.saved = memory.snapshot
                memory.resting.unlink(missing_ok=True)
        await self._make_room()
        return memory

    async def export(self, user: str, name: str) -> Path:
        """What a memory is now, as a file of its own, which the caller must remove."""
        async with self._alone(user, name) as memory:
            file = memory.file.with_name(f".{uuid.uuid4().hex}{SAVED}")
            await self._write(await self._woken(memory), file)
        await self._make_room()
        return file

    async def load(self, user: str, name: str) -> Memory:
        """Go back to a memory's file."""
        async with self._alone(user, name) as memory:
            if not memory.file.exists():
                raise Refused(f"memory {shown(name)} has no file; save it first.", 404)
            await self._replace(memory, await self._made("ttt_load", str(memory.file), status=400))
        await self._make_room()
        return memory

    async def upload(self, user: str, name: str, body: AsyncIterator[bytes]) -> Memory:
        """Take a session's file as a memory, a new one or in place of one; refused if it is not of this
        model."""
        memory = await self._own(user, name)
        try:
            _make_folder_of(memory.file)
            # the name is the memory's: the folder is the server's own
            with new_file(memory.file, ours=True) as partial:
                await self._receive(body, partial)
                made = await self._made("ttt_load", str(partial), status=400)
            await self._replace(memory, made)
        finally:
            self._release(memory)
        await self._make_room()
        return memory

    async def fork(self, user: str, name: str, to: str) -> Memory:
        """Another name for what a memory is now; from here on each goes its own way."""
        self.find(user, name)
        copy = await self._own(user, to)
        try:
            if copy.exists:
                raise Refused(
                    f"there is a memory {shown(to)} already; delete it, or choose another name.", 409
                )
            copy.snapshot = await self._woken(self.find(user, name))
            self._uses[copy.snapshot] += 1
            copy.used = next(self._clock)
        finally:
            self._release(copy)
        return copy

    async def delete(self, user: str, name: str) -> None:
        """Its files too."""
        async with self._alone(user, name) as memory, memory.waking:
            del self._of(user)[memory.name]
            memory.file.unlink(missing_ok=True)
            memory.resting.unlink(missing_ok=True)
            await self._forget(memory)

    def _of(self, user: str) -> dict[str, Memory]:
        """A user's memories; the first time, those on disk."""
        if user not in self._users:
            files = (self.folder / user).glob("[!.]*")
            known = {
                file.with_name(f"{file.stem}{SAVED}") for file in files if file.suffix in (SAVED, RESTING)
            }
            self._users[user] = {memory.name: memory for memory in map(Memory, known)}
        return self._users[user]

    async def _own(self, user: str, name: str) -> Memory:
        """The memory of that name, made if it is new, for its caller alone to write: who must release
        `writing`."""
        if (problem := await self._make_room()) is not None:
            raise problem
        mine = self._of(user)
        while True:
            if check_name(name) not in mine:
                if (
                    sum(memory.exists or memory.writing.locked() for memory in mine.values())
                    >= self.settings.per_user
                ):
                    raise Refused(
                        f"there are {self.settings.per_user} memories, the most that one key may have; "
                        "delete one.",
                        409,
                    )
                mine[name] = Memory(self.folder / user / f"{name}{SAVED}")
            memory = mine[name]
            await memory.writing.acquire()
            if mine.get(name) is memory:
                return memory
            memory.writing.release()  # it was deleted meanwhile

    def _release(self, memory: Memory) -> None:
        """What `_own` gave; a name in which nothing came about goes."""
        memory.writing.release()
        if not memory.exists:
            self._of(memory.file.parent.name).pop(memory.name, None)

    @asynccontextmanager
    async def _alone(self, user: str, name: str) -> AsyncIterator[Memory]:
        """A memory that is there, and that no request writes."""
        memory = self.find(user, name)
        async with memory.writing:
            yield self.find(user, name)

    async def _wake(self, memory: Memory) -> str | None:
        """The memory's snapshot, from disk if it rests there; None where nothing is written yet."""
        async with memory.waking:
            if memory.snapshot is None and (file := memory.on_disk) is not None:
                await self._become(memory, await self._made("ttt_load", str(file), status=400))
                if file == memory.resting:
                    memory.rested = memory.snapshot
                else:
                    memory.saved = memory.snapshot
            return memory.snapshot

    async def _woken(self, memory: Memory) -> str:
        """The snapshot of a memory that is there; it may have been deleted while others woke it or put it to
        rest."""
        if (snapshot := await self._wake(memory)) is None:
            raise _unknown(memory.name)
        return snapshot

    async def _replace(self, memory: Memory, snapshot: str) -> None:
        """Make the snapshot of its file the memory's, whatever was being woken for those who only read it."""
        async with memory.waking:
            await self._become(memory, snapshot)
            memory.saved = memory.snapshot
            memory.resting.unlink(missing_ok=True)

    async def _made(self, how: str, what: str, status: int) -> str:
        """A new snapshot, by a call of the worker's."""
        name = uuid.uuid4().hex
        self._about[name] = await self._call(how, name, what, status=status)
        KNOWN.add(name)
        return name

    async def _become(self, memory: Memory, snapshot: str) -> None:
        before, memory.snapshot = memory.snapshot, snapshot
        memory.used = next(self._clock)
        self._uses[snapshot] += 1
        await self._let_go(before)

    async def _let_go(self, snapshot: str | None) -> None:
        """One use less."""
        if snapshot is None:
            return
        self._uses[snapshot] -= 1
        if self._uses[snapshot] == 0:
            del self._uses[snapshot], self._about[snapshot]
            KNOWN.discard(snapshot)
            await self.engine.collective_rpc("ttt_drop", args=(snapshot,))

    async def _forget(self, memory: Memory) -> None:
        """Hold nothing of it but its files."""
        gone, memory.snapshot = memory.snapshot, None
        await self._let_go(gone)

    async def _receive(self, body: AsyncIterator[bytes], file: Path) -> None:
        size = 0
        with file.open("wb") as written:
            async for block in body:
                size += len(block)
                if size > self.settings.upload:
                    raise Refused(
                        f"the file is larger than {self.settings.upload:,} bytes, the most that is taken.",
                        413,
                    )
                written.write(block)

    async def _write(self, snapshot: str, file: Path) -> None:
        _make_folder_of(file)
        await self._call("ttt_save", snapshot, str(file), status=507)

    async def _make_room(self) -> Refused | None:
        """The least recently used go to disk, except those that a request writes; why one could not, where
        there is still no room.

        What a request has written is the memory's by then, so that its end does not fail by this: the next
        that would write does.
        """
        problem = None
        held = [
            memory for mine in self._users.values() for memory in mine.values() if memory.snapshot is not None
        ]
        for memory in sorted(held, key=lambda memory: memory.used):
            if self._has_room():
                break
            if memory.snapshot is not None and not (memory.writing.locked() or memory.waking.locked()):
                async with memory.writing, memory.waking:
                    try:
                        if memory.snapshot != memory.rested and not memory.is_saved:
                            await self._write(memory.snapshot, memory.resting)
                            memory.rested = memory.snapshot
                        await self._forget(memory)
                    except Refused as error:
                        _LOG.error("In-Place TTT: a memory cannot rest on disk: %s", error)
                        problem = error
        return None if self._has_room() else problem

    def _has_room(self) -> bool:
        return sum(about["bytes"] for about in self._about.values()) <= self.settings.in_memory

    async def _call(self, method: str, *args: str, status: int) -> Mapping[str, int]:
        """What all workers answer. Raises Refused with the sentence of one that cannot."""
        answers = await self.engine.collective_rpc(method, args=args)
        for answer in answers:
            if "error" in answer:
                raise Refused(answer["error"], status)
        return {
            name: sum(answer[name] for answer in answers) if name == "bytes" else answers[0][name]
            for name in answers[0]
        }


def _unknown(name: str) -> Refused:
    return Refused(f"there is no memory {shown(name)}; a request without freeze makes it, or an upload.", 404)


def _make_folder_of(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"the server's folder of memories takes none: {error.strerror}.", 507) from None

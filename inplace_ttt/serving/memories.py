"""The server's side of memories: a user and a name map to a snapshot in the workers.

A snapshot never changes. A request starts from its memory's current snapshot, and makes a new one at its end.
Other requests that started from the old snapshot still read the old one. If snapshots take too much of the
workers' memory, the least recently used memories are moved to disk.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..errors import shown
from ..files.folders import new_file
from .memory import RESTING, SAVED, Memory, Refused, about_file, check_name, check_writable, unknown
from .memory_settings import MemorySettings, Turn
from .read_counts import ReadCounts
from .request_settings import KNOWN
from .worker_calls import Engine, call, make_folder_of, receive

_LOG = logging.getLogger(f"vllm.{__name__}")


class Memories:
    """The memories of all users. Their files are FOLDER/USER/NAME.state and FOLDER/USER/NAME.resting.

    Args:
        engine: the engine whose workers hold the snapshots.
        only_reads: True if the engine cannot write fast weights, because the writes are loss gradients.

    Raises:
        InPlaceTTTError: if the folder is not writable.
    """

    def __init__(self, engine: Engine, settings: MemorySettings, only_reads: bool = False) -> None:
        self.only_reads = only_reads
        self.engine, self.settings, self.folder = engine, settings, Path(settings.folder).resolve()
        check_writable(self.folder)
        # files that `export` wrote before the server was killed
        for cut_off in self.folder.glob(f"*/.{'[0-9a-f]' * 32}{SAVED}"):
            cut_off.unlink(missing_ok=True)
        self.counts = ReadCounts(engine)
        self._users: dict[str, dict[str, Memory]] = {}
        self._about: dict[str, Mapping[str, int]] = {}
        # per snapshot: the number of memories and of requests that use it
        self._uses: Counter[str] = Counter()
        self._clock = itertools.count(1)

    def all_of(self, user: str) -> list[dict[str, Any]]:
        """Returns the descriptions of a user's memories, sorted by name."""
        return [self.describe(memory) for _, memory in sorted(self._of(user).items()) if memory.exists]

    def describe(self, memory: Memory) -> dict[str, Any]:
        """Returns a memory's name, size, place (`memory` or `disk`), and whether it is saved."""
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
        """Returns a user's memory. Raises Refused (404) if there is none of that name."""
        memory = self._of(user).get(check_name(name))
        if memory is None or not memory.exists:
            raise unknown(name)
        return memory

    async def begin(self, user: str, name: str, freeze: bool) -> Turn:
        """Begins a request's turn, which must be ended by `end`.

        A request that writes waits for the other requests that write this memory.

        Args:
            freeze: the request only reads the memory.

        Raises:
            Refused: if a frozen request's memory does not exist, or a new one cannot be made or written.
        """
        if self.only_reads and not freeze:
            raise Refused(
                "this model writes loss gradients, which vLLM cannot compute; read the text with Session, "
                "upload the session's file to /v1/memories/NAME/file, and set freeze.",
                400,
            )
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
        """Ends a request's turn, and updates its memory if the request succeeded.

        Args:
            well: the request succeeded, and its client is still connected.

        Raises:
            Refused: if the worker kept no state of the request.
        """
        KNOWN.discard(turn.keep or "")
        try:
            if turn.keep is not None and well:
                before = 0 if turn.start is None else self._about[turn.start]["tokens"]
                read = before + self.counts.take(turn.keep)
                await self._become(turn.memory, await self._made("ttt_keep", turn.keep, read, status=500))
            elif turn.keep is not None:
                self.counts.take(turn.keep)
                await self.engine.collective_rpc("ttt_forget", args=(turn.keep,))
        finally:
            if turn.keep is not None:
                self._release(turn.memory)
            await self._let_go(turn.start)
        await self._make_room()

    async def save(self, user: str, name: str) -> Memory:
        """Writes a memory to its file in one step, unless the file already holds it."""
        async with self._alone(user, name) as memory:
            if not memory.is_saved:
                await self._write(await self._woken(memory), memory.file)
                memory.saved = memory.snapshot
                memory.resting.unlink(missing_ok=True)
        await self._make_room()
        return memory

    async def export(self, user: str, name: str) -> Path:
        """Writes a memory's current content to a temporary file, which the caller must remove."""
        async with self._alone(user, name) as memory:
            file = memory.file.with_name(f".{uuid.uuid4().hex}{SAVED}")
            await self._write(await self._woken(memory), file)
        await self._make_room()
        return file

    async def load(self, user: str, name: str) -> Memory:
        """Replaces a memory's content with that of its file. Raises Refused (404) if the file is missing."""
        async with self._alone(user, name) as memory:
            if not memory.file.exists():
                raise Refused(f"memory {shown(name)} lacks a file; save it first.", 404)
            await self._replace(memory, await self._made("ttt_load", str(memory.file), status=400))
        await self._make_room()
        return memory

    async def upload(self, user: str, name: str, body: AsyncIterator[bytes]) -> Memory:
        """Makes a memory from a session's file, or replaces one.

        Args:
            body: the file's bytes.

        Raises:
            Refused: if the file is too large, damaged, or of another model.
        """
        memory = await self._own(user, name)
        try:
            make_folder_of(memory.file)
            # the memory's lock guards the name, since the folder belongs to this server alone
            with new_file(memory.file, ours=True) as partial:
                await receive(body, partial, self.settings.upload)
                made = await self._made("ttt_load", str(partial), status=400)
            await self._replace(memory, made)
        finally:
            self._release(memory)
        await self._make_room()
        return memory

    async def fork(self, user: str, name: str, to: str) -> Memory:
        """Copies a memory's current content to the new name `to`. The two are independent from then on.

        Raises:
            Refused: if a memory of the new name exists.
        """
        self.find(user, name)
        copy = await self._own(user, to)
        try:
            if copy.exists:
                raise Refused(f"memory {shown(to)} exists already; delete it, or choose another name.", 409)
            copy.snapshot = await self._woken(self.find(user, name))
            self._uses[copy.snapshot] += 1
            copy.used = next(self._clock)
        finally:
            self._release(copy)
        return copy

    async def delete(self, user: str, name: str) -> None:
        """Deletes a memory and its files."""
        async with self._alone(user, name) as memory, memory.waking:
            del self._of(user)[memory.name]
            memory.file.unlink(missing_ok=True)
            memory.resting.unlink(missing_ok=True)
            await self._forget(memory)

    def _of(self, user: str) -> dict[str, Memory]:
        """Returns a user's memories by name. The first call finds those on disk."""
        if user not in self._users:
            files = (self.folder / user).glob("[!.]*")
            known = {
                file.with_name(f"{file.stem}{SAVED}") for file in files if file.suffix in (SAVED, RESTING)
            }
            self._users[user] = {memory.name: memory for memory in map(Memory, known)}
        return self._users[user]

    async def _own(self, user: str, name: str) -> Memory:
        """Returns the memory of that name, made if it is new, with `writing` held for the caller.

        The caller must release it by `_release`.
        """
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
                        f"this key has {self.settings.per_user} memories, the largest number per key; "
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
        """Releases a memory that `_own` returned, and drops its name if nothing was written."""
        memory.writing.release()
        if not memory.exists:
            self._of(memory.file.parent.name).pop(memory.name, None)

    @asynccontextmanager
    async def _alone(self, user: str, name: str) -> AsyncIterator[Memory]:
        """Holds an existing memory while no request writes it."""
        memory = self.find(user, name)
        async with memory.writing:
            yield self.find(user, name)

    async def _wake(self, memory: Memory) -> str | None:
        """Returns the memory's snapshot, loaded if it is on disk; None if nothing is written yet."""
        async with memory.waking:
            if memory.snapshot is None and (file := memory.on_disk) is not None:
                await self._become(memory, await self._made("ttt_load", str(file), status=400))
                if file == memory.resting:
                    memory.rested = memory.snapshot
                else:
                    memory.saved = memory.snapshot
            return memory.snapshot

    async def _woken(self, memory: Memory) -> str:
        """Returns the snapshot of an existing memory.

        Raises Refused if it was deleted while another task loaded it or moved it to disk.
        """
        if (snapshot := await self._wake(memory)) is None:
            raise unknown(memory.name)
        return snapshot

    async def _replace(self, memory: Memory, snapshot: str) -> None:
        """Makes a snapshot that was read from the memory's file the memory's current snapshot.

        It waits for a load that a reading request started.
        """
        async with memory.waking:
            await self._become(memory, snapshot)
            memory.saved = memory.snapshot
            memory.resting.unlink(missing_ok=True)

    async def _made(self, how: str, *what: str | int, status: int) -> str:
        """Makes a new snapshot through the worker's method `how`, and returns its id."""
        name = uuid.uuid4().hex
        self._about[name] = await call(self.engine, how, name, *what, status=status)
        KNOWN.add(name)
        return name

    async def _become(self, memory: Memory, snapshot: str) -> None:
        before, memory.snapshot = memory.snapshot, snapshot
        memory.used = next(self._clock)
        self._uses[snapshot] += 1
        await self._let_go(before)

    async def _let_go(self, snapshot: str | None) -> None:
        """Decrements a snapshot's count of uses, and drops the snapshot at zero."""
        if snapshot is None:
            return
        self._uses[snapshot] -= 1
        if self._uses[snapshot] == 0:
            del self._uses[snapshot], self._about[snapshot]
            KNOWN.discard(snapshot)
            await self.engine.collective_rpc("ttt_drop", args=(snapshot,))

    async def _forget(self, memory: Memory) -> None:
        """Drops the memory's snapshot, and leaves its files."""
        gone, memory.snapshot = memory.snapshot, None
        await self._let_go(gone)

    async def _write(self, snapshot: str, file: Path) -> None:
        make_folder_of(file)
        await call(self.engine, "ttt_save", snapshot, str(file), status=507)

    async def _make_room(self) -> Refused | None:
        """Moves the least recently used memories to disk, except those that a request writes.

        Returns the error of a failed write to disk, if there is still no room. The caller that ends a request
        ignores it, since the memory is already updated. The next request that would write raises it.
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
                        _LOG.error("In-Place TTT: a memory cannot be moved to disk: %s", error)
                        problem = error
        return None if self._has_room() else problem

    def _has_room(self) -> bool:
        return sum(about["bytes"] for about in self._about.values()) <= self.settings.in_memory

"""One memory: its name, its current snapshot, and its files."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import InPlaceTTTError, shown
from ..files.folders import disk_errors

SAVED, RESTING = ".state", ".resting"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class Refused(InPlaceTTTError):
    """An error in a user's request, or in serving it.

    Args:
        status: the HTTP status code.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Memory:
    """A user's memory, in the workers' memory or on disk.

    Attributes:
        file: the file that the user saved; its folder and stem are the user and the memory's name.
        snapshot: the id of the current snapshot; None while the memory is on disk only, or before its first
            write.
        saved: the id of the snapshot that `file` holds, where known.
        rested: the id of the snapshot that `resting` holds, where known.
        used: the time of the last use, as a count; the least recently used memories are moved to disk.
        writing: held by the request that writes the memory.
        waking: held while the snapshot is loaded, replaced, or moved to disk.
    """

    file: Path
    snapshot: str | None = None
    saved: str | None = None
    rested: str | None = None
    used: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    waking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(SAVED)

    @property
    def resting(self) -> Path:
        """The file to which the server moves the memory when the workers' memory is full."""
        return self.file.with_name(f"{self.name}{RESTING}")

    @property
    def on_disk(self) -> Path | None:
        """The newest file. A server that was killed after a save may have left an older resting file."""
        found = [file for file in (self.resting, self.file) if file.exists()]
        return max(found, key=lambda file: file.stat().st_mtime_ns, default=None)

    @property
    def exists(self) -> bool:
        return self.snapshot is not None or self.on_disk is not None

    @property
    def is_saved(self) -> bool:
        """True if the user's file holds the memory's current content."""
        return self.file.exists() and (
            self.saved == self.snapshot if self.snapshot is not None else self.on_disk == self.file
        )


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Refused(f"a memory's name is up to 64 letters, digits, dots, - and _, not {shown(name)}.", 400)
    return name


def about_file(file: Path) -> dict[str, int]:
    """Returns a file's tokens, chunks and bytes, as the workers report them for a snapshot.

    The file is not verified. The result is empty if it cannot be read as a session.
    """
    try:
        with safe_open(file, framework="pt") as held:
            counts = next(held.get_tensor(name) for name in held.keys() if name.endswith(".counts"))  # noqa: SIM118 - not a mapping
            chunk = json.loads(held.metadata()["session"])["config"]["chunk_size"]
        filled, written = (int(count) for count in counts[:2, 0])
    except (OSError, SafetensorError, StopIteration, LookupError, TypeError, ValueError):
        return {}
    return {"tokens": written * chunk + filled, "chunks": written, "bytes": file.stat().st_size}


def check_writable(folder: Path) -> None:
    """Creates a folder. Raises InPlaceTTTError if it is not writable."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


def unknown(name: str) -> Refused:
    return Refused(
        f"memory {shown(name)} does not exist; create it by a request without freeze, or by an upload.", 404
    )

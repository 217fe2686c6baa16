"""One memory: its name, the snapshot that it stands for, and its files."""

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
    """What cannot be done for a user. status: of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Memory:
    """snapshot: None while it rests on disk, or before anything is written. saved, rested: the snapshots that
        its files hold, where known.

    file: what its user saved. resting: what was put there for want of room.
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
        return self.file.with_name(f"{self.name}{RESTING}")

    @property
    def on_disk(self) -> Path | None:
        """The newest file; a server that was killed may have saved, and not yet removed what rested
        before."""
        found = [file for file in (self.resting, self.file) if file.exists()]
        return max(found, key=lambda file: file.stat().st_mtime_ns, default=None)

    @property
    def exists(self) -> bool:
        return self.snapshot is not None or self.on_disk is not None

    @property
    def is_saved(self) -> bool:
        """Whether its user's file holds what it is now."""
        return self.file.exists() and (
            self.saved == self.snapshot if self.snapshot is not None else self.on_disk == self.file
        )


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Refused(f"a memory's name is up to 64 letters, digits, dots, - and _, not {shown(name)}.", 400)
    return name


def about_file(file: Path) -> dict[str, int]:
    """As the workers say it of a snapshot, of a file that nobody has proved; without numbers where it is
    none."""
    try:
        with safe_open(file, framework="pt") as held:
            counts = next(held.get_tensor(name) for name in held.keys() if name.endswith(".counts"))  # noqa: SIM118 - not a mapping
            chunk = json.loads(held.metadata()["session"])["config"]["chunk_size"]
        filled, written = (int(count) for count in counts[:2, 0])
    except (OSError, SafetensorError, StopIteration, LookupError, TypeError, ValueError):
        return {}
    return {"tokens": written * chunk + filled, "chunks": written, "bytes": file.stat().st_size}


def check_writable(folder: Path) -> None:
    """Raises InPlaceTTTError for a folder in which nothing can be saved."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()

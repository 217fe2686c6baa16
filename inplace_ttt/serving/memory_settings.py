"""The settings of a server's memories, and one request's use of a memory."""

from __future__ import annotations

from dataclasses import dataclass

from .memory import Memory


@dataclass(frozen=True)
class MemorySettings:
    """Settings of `Memories`.

    Attributes:
        folder: the folder for saved memories, and for those moved to disk.
        per_user: the largest number of memories per user.
        in_memory: the largest total size of the snapshots in the workers, in bytes.
        upload: the largest size of an uploaded file, in bytes.
    """

    folder: str = "memories"
    per_user: int = 64
    in_memory: int = 4 << 30
    upload: int = 1 << 30


@dataclass(eq=False)
class Turn:
    """One request's use of a memory.

    Attributes:
        start: the id of the snapshot that the request starts from; None for W0.
        keep: the name under which the worker keeps the request's final state; None if the request is frozen.
    """

    memory: Memory
    start: str | None
    keep: str | None

"""Checks that this machine has enough memory."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InPlaceTTTError


def available_memory() -> int | None:
    """Returns the bytes that a process can use without swapping; None if unknown."""
    try:
        fields = dict(
            line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return None


def require_memory(needed: int, what: str, available: int | None = None) -> None:
    """Raises InPlaceTTTError if more memory is needed than available.

    Allocating too much could end the process without a message.

    Args:
        needed: bytes.
        what: subject of the message.
        available: bytes; None for this machine's available memory.
    """
    available = available_memory() if available is None else available
    if available is not None and needed > available:
        raise InPlaceTTTError(
            f"{what} needs {needed / 1e9:,.1f} GB of memory, but {available / 1e9:,.1f} are free; use "
            "smaller sizes."
        )

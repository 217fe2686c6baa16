"""Checks that a file name is valid, and that a file can be read to its end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import InPlaceTTTError


def name_problem(name: str) -> str | None:
    """Returns the reason why a file cannot have this name, or None."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return "is not text that a file name can hold"
    if not name or "\0" in name:
        return "is empty" if not name else "has a zero byte in it"
    if len(encoded) > 4000 or any(len(part) > 255 for part in encoded.split(b"/")):
        return "is too long for a file name"
    return None


def require_regular(path: str | os.PathLike[str], problem: str) -> None:
    """Raises InPlaceTTTError for an existing path that is not a regular file.

    A pipe may never end. A missing file passes; its reader raises.

    Args:
        path: the path to check.
        problem: beginning of the message.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise InPlaceTTTError(f"{problem}: {path} is {kind_of(mode)}, not a file.")


def refuse_pipes_in(folder: Path) -> None:
    """Raises InPlaceTTTError for a folder with a device or pipe in it.

    Readers of other libraries would wait for it forever.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                mode = entry.stat().st_mode
            except OSError:  # a dangling link cannot be read, and does no harm
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise InPlaceTTTError(
                    f"{entry.path} is {kind_of(mode)}, not a file; remove it from the folder."
                )


def kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")

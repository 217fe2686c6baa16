"""Names of files that can be names, and files that can be read to their end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import InPlaceTTTError


def name_problem(name: str) -> str | None:
    """Why no file can have this name, or None."""
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
    """Refuse what is there and no file: a folder, a device, or a pipe, which may never end. What is missing
    is left to the reader."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise InPlaceTTTError(f"{problem}: {path} is {kind_of(mode)}, not a file.")


def refuse_pipes_in(folder: Path) -> None:
    """Refuse a folder with a device or a pipe in it, for which other people's readers wait without end."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                mode = entry.stat().st_mode
            except OSError:  # a link to nothing is as good as no file
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

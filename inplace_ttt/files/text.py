"""Text files as rows of tokens: as much of each as is needed, and no more."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InPlaceTTTError, one_line

_BYTES_A_TOKEN = 8
_TAIL = 16
"""Tokens at the end of a cut text that may be others in the whole one."""


def tokens_of(path: str | os.PathLike[str], tokenizer: Any, tokens: int) -> Tensor:
    """The first `tokens` token ids of a UTF-8 text file, int64 [1, n ≤ tokens]; a longer text is not read to its end."""
    size = _BYTES_A_TOKEN * (tokens + _TAIL)
    while True:
        text, whole = _start_of(path, size)
        ids = tokenizer(text, truncation=False, verbose=False).input_ids
        if whole or len(ids) >= tokens + _TAIL:
            break
        size *= 2
    if not text.strip():
        raise InPlaceTTTError(f"{path} holds no text; give something to read.")
    return torch.tensor([ids[:tokens]], dtype=torch.int64)


def files_in(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files named, and for a folder the .txt files in it and below, sorted."""
    found: list[Path] = []
    for path in map(Path, paths):
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise InPlaceTTTError(f"{path} has no .txt files; name the texts themselves.")
        found += files
    return found


def _start_of(path: str | os.PathLike[str], size: int) -> tuple[str, bool]:
    """The text of a file's first bytes, and whether that is all of it."""
    try:
        with open(path, "rb") as file:
            start = file.read(size)
            whole = not file.read(1)
        return codecs.getincrementaldecoder("utf-8")().decode(start, final=whole), whole
    except (OSError, UnicodeDecodeError) as error:
        raise InPlaceTTTError(f"cannot read the text {path}: {one_line(error)}; give a UTF-8 text file.") from None

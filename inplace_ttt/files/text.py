"""UTF-8 text files, and texts as token ids."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from typing import Any, BinaryIO

from ..errors import InPlaceTTTError, one_line, reported
from .paths import kind_of

_PIECE = 1 << 20
UTF8 = "utf-8-sig"
"""Without the mark (BOM) that some editors put first, which is no part of the text."""
KNOWN_IDS = "inplace_ttt_known_ids"
"""Attribute of a tokenizer with special tokens beyond its model's embeddings: how many ids the model
knows."""


def document_ids(tokenizer: Any, text: str, source: str) -> list[int]:
    """Token ids of a text that is a document, with the tokenizer's special tokens.

    Raises InPlaceTTTError for a text that the tokenizer cannot read, or that holds a token its model has no
    embedding for.
    """
    with reported(f"the tokenizer cannot read {source}"):
        ids = tokenizer(text, truncation=False, verbose=False).input_ids
    return refuse_beyond(with_one_beginning(ids, begins_of(tokenizer)), tokenizer, source)


def with_one_beginning(ids: list[int], begins: list[int]) -> list[int]:
    """Ids of a text without the BOS that the text itself spells, where the tokenizer has put one before
    it."""
    while begins and ids[: 2 * len(begins)] == begins * 2:
        ids = ids[len(begins) :]
    return ids


def refuse_beyond(ids: list[int], tokenizer: Any, source: str) -> list[int]:
    """The ids; refused where one is a special token beyond the model's embeddings, of which
    `require_known_ids` took note."""
    known = getattr(tokenizer, KNOWN_IDS, None)
    if known is not None and ids and (largest := max(ids)) >= known:
        raise InPlaceTTTError(
            f"{source} holds {tokenizer.convert_ids_to_tokens(largest)!r} (id {largest}), for which the "
            "model has no embedding (it has "
            f"{known}); take it out of the text, or take the model's own tokenizer."
        )
    return ids


def begins_of(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before every text, as a BOS."""
    text = "a"
    ids, within = tokenizer(text, verbose=False).input_ids, ids_within(tokenizer, text)
    return ids[
        : next((n for n in range(len(ids) - len(within) + 1) if ids[n : n + len(within)] == within), 0)
    ]


def ids_within(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that stands within another: without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def require_known_ids(tokenizer: Any, model: Any, source: str) -> None:
    """Refuse a tokenizer that gives ids which the model has no embedding for. Special tokens may lie beyond,
    until a text holds one."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    numbers = set(tokenizer.get_vocab().values())
    largest = max(numbers - special, default=0)
    if largest >= (known := model.get_input_embeddings().num_embeddings):
        raise InPlaceTTTError(
            f"{source} has the tokenizer of another model: it gives ids up to {largest}, the model knows "
            f"{known}."
        )
    if max(numbers, default=0) >= known:
        setattr(tokenizer, KNOWN_IDS, known)


def read_text(path: str | os.PathLike[str], what: str = "") -> str:
    """A whole UTF-8 text file, or with `-` what comes from standard input. what: names it in an error, with a
    space behind."""
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read().decode(UTF8) if hasattr(sys.stdin, "buffer") else sys.stdin.read()
        with _opened(path, pipe=True) as file:
            return file.read().decode(UTF8)
    except (OSError, ValueError, AttributeError) as error:  # standard input may be closed, or none
        raise InPlaceTTTError(
            f"cannot read {what}{path}: {one_line(error)}; give a UTF-8 text file."
        ) from None


def start_of(path: str | os.PathLike[str], size: int) -> tuple[str, bool]:
    """The text of a file's first bytes, and whether that is all of it."""
    try:
        with _opened(path) as file:
            pieces = []
            while size > 0 and (piece := file.read(min(size, _PIECE))):
                pieces.append(piece)
                size -= len(piece)
            whole = not file.read(1)
        return codecs.getincrementaldecoder(UTF8)().decode(b"".join(pieces), final=whole), whole
    except (OSError, ValueError) as error:
        raise InPlaceTTTError(
            f"cannot read the text {path}: {one_line(error)}; give a UTF-8 text file."
        ) from None


def _opened(path: str | os.PathLike[str], *, pipe: bool = False) -> BinaryIO:
    """A file to read. A device may never end and a named pipe never begin; `pipe`: one from a process that
    runs, as bash's <(…)."""
    mode = os.stat(path).st_mode
    from_process = pipe and stat.S_ISFIFO(mode) and os.path.realpath(path).startswith("/proc/")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or from_process):
        raise ValueError(f"it is {kind_of(mode)}")
    return open(path, "rb")

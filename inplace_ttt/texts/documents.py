"""Finds the documents that a command is given by name.

They are text files, or records of JSON lines, parquet or a dataset.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InPlaceTTTError
from ..files.text import begins_of, document_ids, read_text, start_of
from .chats import CHAT, chat_text
from .json_lines import TOKENS, text_of
from .records import open_source, read_error
from .sources import Reading, Source, find, is_compressed

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 8
_TAIL = 16
"""Tokens at the end of a cut text that may differ from those of the whole text."""
_MOST_RECORDS = 10_000
_MOST_CHARACTERS = 1 << 28
"""Limits per source, because records are held in memory. Text files are read when they are needed."""


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: its file; for a record also its number, counted from 1.
        source: the file, folder or dataset that it comes from.
        content: the text of a record, or its chat. None if the file itself is the text.
    """

    name: str
    source: str
    content: Any = None

    def start(self, size: int, tokenizer: Any) -> tuple[str, bool]:
        """Returns the text of about the first `size` bytes, and True if the document ends there."""
        if self.content is None:
            return start_of(self.name, size)
        if isinstance(self.content, str):
            return self.content, True
        return chat_text(self.content, tokenizer, self.name), True

    def text(self) -> str:
        """Returns the whole text. Raises InPlaceTTTError for a chat, which is text only for a tokenizer."""
        if self.content is None:
            return read_text(self.name)
        if not isinstance(self.content, str):
            raise InPlaceTTTError(f"{self.name} is a chat; give prose here.")
        return self.content


def documents_in(
    names: Iterable[str | os.PathLike[str]], option: str = "--text", text_field: str | None = None
) -> list[Document]:
    """Returns the documents of files, folders, patterns and datasets.

    A text file is one document. A record of JSON lines, JSON, parquet, Arrow or a dataset is one document:
    its field `text`, its chat in `messages`, or its field `text_field`. A note on stderr counts the records.

    Args:
        names: the names that the user gave.
        option: the option that the names were given to, for errors.
        text_field: the field of a record that holds its text.

    Raises:
        InPlaceTTTError: if a name stands for nothing, or its records hold no text; if no source has records
            and `text_field` is given.

    Examples:
        >>> documents_in(["speeches/", "more.jsonl"], "--text")  # doctest: +SKIP
    """
    reading = Reading(text_field=text_field)
    found: list[Document] = []
    has_records = False
    for name in (os.fspath(given) for given in names):
        source = find(name, reading, option)
        if source.kind == "hub" and "/" not in name:
            raise InPlaceTTTError(f"{option}: the file or folder {name} does not exist; correct the path.")
        if source.kind == "text" and not any(map(is_compressed, source.files)):
            found += [Document(str(file), str(file)) for file in source.files]
        else:
            has_records = True
            found += _records(source, reading)
    if text_field is not None and not has_records:
        raise InPlaceTTTError("--text-field does nothing with text files, which lack fields; leave it out.")
    return found


def _records(source: Source, reading: Reading) -> list[Document]:
    """Returns the documents of a source's records, up to the limits above, and reports how many there are."""
    records, column = open_source(source, reading, streaming=True)
    if column == TOKENS:
        raise InPlaceTTTError(
            f"{source.name} holds token ids (input_ids), but this command reads text; give the texts."
        )
    found: list[Document] = []
    characters = 0
    more = ""
    try:
        for number, record in enumerate(records, 1):
            if len(found) == _MOST_RECORDS or characters >= _MOST_CHARACTERS:
                more = "; the others are left out"
                break
            value = record[column]
            if column != CHAT:
                value = text_of(value, column, source.name, reading.field_option)
            if not (value and (column == CHAT or value.strip())):
                continue
            found.append(Document(f"{source.name}:{number}", source.name, value))
            characters += len(value)
    except InPlaceTTTError:
        raise
    except Exception as error:
        raise read_error([source], reading, error) from None
    if not found:
        raise InPlaceTTTError(f"{source.name} lacks records with text in its field {column!r}; leave it out.")
    logger.warning(
        "read %s documents of %s, each from its field %r%s", f"{len(found):,}", source.name, column, more
    )
    return found


def tokens_of(document: Document, tokenizer: Any, tokens: int) -> Tensor:
    """Returns the first `tokens` token ids of a document, int64 [1, n ≤ tokens].

    A longer file is not read to its end.
    """
    size = _BYTES_PER_TOKEN * (tokens + _TAIL)
    while True:
        text, whole = document.start(size, tokenizer)
        ids = document_ids(tokenizer, text, document.name)
        if whole or len(ids) >= tokens + _TAIL:
            break
        size *= 2
    if not text.strip():
        raise InPlaceTTTError(f"{document.name} holds no text; give something to read.")
    return torch.tensor([ids[:tokens]], dtype=torch.int64)


def joined_tokens(documents: Sequence[Document], tokenizer: Any, tokens: int) -> Tensor:
    """Returns the first `tokens` token ids of documents as one text, int64 [1, n ≤ tokens]."""
    found: list[int] = []
    begins = begins_of(tokenizer)
    for document in documents:
        if len(found) >= tokens:
            break
        ids = tokens_of(document, tokenizer, tokens - len(found) + len(begins))[0].tolist()
        found += ids[len(begins) if found else 0 :]
    return torch.tensor([found[:tokens]], dtype=torch.int64)

"""Reads one field of files with one JSON object per line. Other fields may have any type."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import InPlaceTTTError, shown
from ..files.json_files import parse_json
from .chats import CHAT, turns

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

TOKENS = "input_ids"
"""The field of a record that holds its token ids."""
_LINE = "text"
"""The column that `datasets` puts lines into."""
_PROBED = 1000
"""Records of a file that are looked through for the names of its fields."""


def _zstandard(file: Path, mode: str) -> IO[bytes]:
    import zstandard

    return io.BufferedReader(zstandard.open(file, mode))


_OPENERS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
}


def holds_lines(file: Path) -> bool:
    """Returns True for a file whose first line is a complete JSON object.

    Other JSON files hold one list, or one object over many lines.
    """
    with _OPENERS.get(file.suffix.lower(), open)(file, "rb") as opened:
        first = next((line for line in opened if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    try:  # the reader reports bytes that are not UTF-8
        return isinstance(parse_json(first.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")), dict)
    except ValueError:
        return False


def fields_of(lines: Dataset | IterableDataset, source: str) -> list[str]:
    """Returns the fields' names in the first records, in the order of first use; empty without records."""
    found: dict[str, None] = {}
    for number, record in enumerate(lines):
        if number == _PROBED:
            break
        if record[_LINE].strip():
            found |= dict.fromkeys(_record(record[_LINE], source, number))
    return list(found)


def field_of_lines(lines: Any, field: str, source: str, option: str) -> Any:
    """Returns the records with one column, `field`; None if a record lacks it.

    The column holds token ids if it is `input_ids`, a chat if it is `messages`, else text.

    Args:
        option: the option that names the field, for errors.
    """
    from datasets import Features, List, Value

    text = Value("string")
    columns = {TOKENS: List(Value("int64")), CHAT: List({"role": text, "content": text})}
    take = functools.partial(_take, field=field, source=source, option=option)
    features = Features({field: columns.get(field, text)})
    return lines.map(take, batched=True, with_indices=True, remove_columns=[_LINE], features=features)


def _take(
    batch: Mapping[str, Sequence[str]], numbers: Sequence[int], field: str, source: str, option: str
) -> dict[str, list[Any]]:
    records = (
        _record(line, source, number)
        for line, number in zip(batch[_LINE], numbers, strict=True)
        if line.strip()
    )
    values = (record.get(field) for record in records)
    if field == TOKENS:
        return {field: [_token_ids(value, field, source) for value in values]}
    if field == CHAT:
        return {field: [None if value is None else turns(value, source) for value in values]}
    return {field: [text_of(value, field, source, option) for value in values]}


def _record(line: str, source: str, number: int) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise InPlaceTTTError(
            f"{source} cannot be read: record {number + 1} is not JSON ({error}); correct it, or leave it "
            "out."
        ) from None
    if not isinstance(record, dict):
        raise InPlaceTTTError(
            f"{source} cannot be read: record {number + 1} is {shown(record)}, not a JSON object; correct it."
        )
    return record


def text_of(value: Any, field: str, source: str, option: str) -> str | None:
    """Returns the value of a text field. Raises InPlaceTTTError if it is not text."""
    if not isinstance(value, str | None):
        raise InPlaceTTTError(
            f"the field {field!r} of {source} holds {type(value).__name__}, not text; set {option}."
        )
    return value


def _token_ids(value: Any, field: str, source: str) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise InPlaceTTTError(
            f"the {field} of {source} are not lists of whole numbers: {shown(value)}; tokenize the "
            "documents anew."
        )
    return value

"""Files of one JSON object per line, of which one field is read: what stands in the other fields, in which
types, does not matter."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...errors import InPlaceTTTError, shown
from ...files.json_files import parse_json

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

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
    """True for a file whose first line is a JSON object by itself; other JSON files are one list, or one
    object over many lines."""
    with _OPENERS.get(file.suffix.lower(), open)(file, "rb") as opened:
        first = next((line for line in opened if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    try:  # bytes that are not UTF-8 are the reader's to name
        return isinstance(parse_json(first.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")), dict)
    except ValueError:
        return False


def fields_of(lines: Dataset | IterableDataset) -> list[str]:
    """Names of the fields of the first records, in the order of their first use; empty where there are no
    records."""
    found: dict[str, None] = {}
    for number, record in enumerate(lines):
        if number == _PROBED:
            break
        if record[_LINE].strip():
            found |= dict.fromkeys(_record(record[_LINE], "", number))
    return list(found)


def field_of_lines(lines: Any, field: str, is_tokens: bool, source: str) -> Any:
    """The records with one column, `field`, that holds text or, with `is_tokens`, token ids; None where a
    record lacks it."""
    from datasets import Features, List, Value

    take = functools.partial(_take, field=field, is_tokens=is_tokens, source=source)
    features = Features({field: List(Value("int64")) if is_tokens else Value("string")})
    return lines.map(take, batched=True, with_indices=True, remove_columns=[_LINE], features=features)


def _take(
    batch: Mapping[str, Sequence[str]], numbers: Sequence[int], field: str, is_tokens: bool, source: str
) -> dict[str, list[Any]]:
    check = _token_ids if is_tokens else _text
    records = (
        _record(line, source, number)
        for line, number in zip(batch[_LINE], numbers, strict=True)
        if line.strip()
    )
    return {field: [check(record.get(field), field, source) for record in records]}


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


def _text(value: Any, field: str, source: str) -> str | None:
    if not isinstance(value, str | None):
        raise InPlaceTTTError(
            f"the field {field!r} of {source} holds {type(value).__name__}, not text; set data.text_field."
        )
    return value


def _token_ids(value: Any, field: str, source: str) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise InPlaceTTTError(
            f"the {field} of {source} are no lists of whole numbers: {shown(value)}; tokenize the "
            "documents anew."
        )
    return value

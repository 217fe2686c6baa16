"""Opens the records of a source through `datasets`, and explains the errors of files that cannot be read."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import InPlaceTTTError
from ..files.text import UTF8
from .chats import CHAT
from .json_lines import TOKENS, field_of_lines, fields_of, holds_lines
from .sources import HUB_NAME, Reading, Source

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Records: TypeAlias = Dataset | IterableDataset

_TEXT = "text"
_SHOWN = 8
"""Number of fields that an error names."""


def open_source(source: Source, reading: Reading, streaming: bool) -> tuple[Records, str]:
    """Returns a source's records with one column, and the name of that column (`Reading.text_field`)."""
    try:
        lines = source.kind == "json" and all(
            holds_lines(file) for file in source.files if file.stat().st_size
        )
        records: Any = (
            _open_files("text", source.files, reading, streaming, "line")
            if lines
            else _open(source, reading, streaming)
        )
        columns = fields_of(records, source.name) if lines else records.column_names
        if columns is None:  # the first record of a stream shows its columns
            columns = list(next(iter(records), {}))
    except InPlaceTTTError:
        raise
    except Exception as error:
        raise read_error([source], reading, error) from None
    wanted = (TOKENS, _TEXT, CHAT) if reading.text_field is None else (reading.text_field,)
    column = next((column for column in wanted if column in columns), None)
    if column is not None and lines:
        return field_of_lines(records, column, source.name, reading.field_option), column
    if column is not None:
        return records.select_columns([column]), column
    if not columns:
        raise InPlaceTTTError(f"{source.name} holds no records; leave it out.")
    shown = ", ".join(map(repr, columns[:_SHOWN])) + ", …" * (len(columns) > _SHOWN)
    raise InPlaceTTTError(
        f"the records of {source.name} lack the field {wanted[min(1, len(wanted) - 1)]!r} (they have "
        f"{shown}); set {reading.field_option}."
    )


def _open(source: Source, reading: Reading, streaming: bool) -> Records:
    from datasets import load_dataset, load_from_disk

    if source.kind == "saved":
        saved: Any = load_from_disk(source.name)
        saved = saved[reading.split] if isinstance(saved, dict) else saved
        return saved.to_iterable_dataset() if streaming else saved
    if source.kind == "hub":
        named = HUB_NAME.fullmatch(source.name)
        where = named.groupdict() if named else {"name": source.name}
        split = where.get("split") or reading.split
        return load_dataset(
            where["name"], where.get("config"), split=split, streaming=streaming, cache_dir=reading.cache
        )
    return _open_files(source.kind, source.files, reading, streaming)


def _open_files(
    kind: str, files: Iterable[Path], reading: Reading, streaming: bool, sample_by: str = "document"
) -> Records:
    """Returns the records of files. A text file is one record, or one per line with sample_by="line", without
    its BOM."""
    from datasets import load_dataset

    settings = {"sample_by": sample_by, "encoding": UTF8} if kind == "text" else {}
    paths = [glob.escape(str(file.resolve())) for file in files]
    return load_dataset(
        kind, data_files=paths, split="train", streaming=streaming, cache_dir=reading.cache, **settings
    )


def read_error(sources: Sequence[Source], reading: Reading, error: BaseException) -> InPlaceTTTError:
    """Returns the error for sources that cannot be read, with the file at fault."""
    if sources[0].kind == "hub":
        return InPlaceTTTError(
            f"{sources[0].name} is neither a file or folder here nor a dataset that can be read from the hub "
            f"({_first_line(error)}); "
            "correct the path, or the name (owner/name:config@split)."
        )
    cause = root_cause(error)
    if isinstance(cause, ImportError) and cause.name:
        names = ", ".join(source.name for source in sources)
        return InPlaceTTTError(
            f"{names} needs the package {cause.name}, which is not installed; pip install {cause.name}."
        )
    culprit = _culprit(sources, reading)
    if culprit is None and (differing := _differing_field(sources, reading)) is not None:
        return InPlaceTTTError(f"{differing}; use one type, or leave that field out of the files.")
    where, error = culprit or (", ".join(source.name for source in sources), root_cause(error))
    if isinstance(error, StopIteration):
        return InPlaceTTTError(f"{where} holds no records; leave it out.")
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return InPlaceTTTError(
            f"{where} is not UTF-8 text ({_first_line(error)}); convert it, or leave it out."
        )
    return InPlaceTTTError(f"{where} cannot be read: {_first_line(error)}; repair it, or leave it out.")


def _culprit(sources: Sequence[Source], reading: Reading) -> tuple[str, BaseException] | None:
    """Returns the first file that cannot be read alone, and the error."""
    for source in sources:
        for file in source.files if source.kind not in ("saved", "hub") else ():
            try:
                for _ in _open_files(source.kind, [file], reading, streaming=True):
                    pass
            except Exception as error:
                return str(file), root_cause(error)
    return None


def _differing_field(sources: Sequence[Source], reading: Reading) -> str | None:
    """Returns the first field whose type differs between two files, which are readable alone."""
    for source in sources:
        seen: dict[str, tuple[str, Path]] = {}
        for file in source.files if source.kind not in ("saved", "hub") else ():
            with suppress(Exception):
                for column, value in next(
                    iter(_open_files(source.kind, [file], reading, streaming=True)), {}
                ).items():
                    kind, first = seen.setdefault(column, (type(value).__name__, file))
                    if value is not None and kind not in ("NoneType", type(value).__name__):
                        return (
                            f"the field {column!r} is {kind} in {first} and {type(value).__name__} in {file}"
                        )
    return None


def root_cause(error: BaseException) -> BaseException:
    """Returns the error that `datasets` wrapped in its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;")

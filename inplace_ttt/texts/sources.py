"""Finds the files or datasets that a name stands for, and opens their records through `datasets`."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import InPlaceTTTError
from ..files.json_files import parse_json
from ..files.paths import kind_of
from ..files.text import UTF8
from .chats import CHAT
from .json_lines import TOKENS, field_of_lines, fields_of, holds_lines

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Records: TypeAlias = Dataset | IterableDataset

_TEXT = "text"
KINDS = {
    "txt": "text",
    "text": "text",
    "md": "text",
    "jsonl": "json",
    "json": "json",
    "ndjson": "json",
    "parquet": "parquet",
    "arrow": "arrow",
}
_COMPRESSED = {"gz", "bz2", "xz", "zst"}
_OTHER_FORMATS = {
    "csv",
    "tsv",
    "xml",
    "html",
    "htm",
    "pdf",
    "doc",
    "docx",
    "epub",
    "odt",
    "zip",
    "tar",
    "tgz",
    "yaml",
}
"""Endings of files that hold text in a form which is not prose."""
_PROBED_BYTES = 1 << 20
_SHOWN = 8
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@:]+))?(@(?P<split>.+))?")


_MOST_ENTRIES = 200_000
"""Files of a folder that are looked through; more are those of a whole disk."""


@dataclass(frozen=True)
class Reading:
    """How sources are read.

    Attributes:
        format: a loader of `datasets` for every file; "auto" goes by each file's ending.
        text_field: the field of a record that holds its text. None takes `input_ids`, `text` or `messages`, the
            first that a record has.
        split: of a dataset, where its name gives none.
        cache: folder in which `datasets` keeps converted files; None for its own.
        field_option, format_option: how the caller's user sets `text_field` and `format`, for errors.
    """

    format: str = "auto"
    text_field: str | None = None
    split: str = "train"
    cache: str | None = None
    field_option: str = "--text-field"
    format_option: str | None = None


@dataclass(frozen=True)
class Source:
    """One named source of documents.

    Attributes:
        role: `train`, `validation`, or the option that names it.
        kind: a loader of `datasets`, "saved" for a folder of `save_to_disk`, or "hub".
    """

    role: str
    name: str
    kind: str
    files: tuple[Path, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Plain values for the report."""
        files = [{"path": str(file), "bytes": file.stat().st_size} for file in self.files]
        return {
            "role": self.role,
            "name": self.name,
            "kind": self.kind,
            "files": files,
            "bytes": sum(f["bytes"] for f in files) if files else None,
        }


def find(name: str, reading: Reading, role: str, option: str) -> Source:
    """Returns the source that a name stands for: a file, a folder, a glob pattern or a dataset of the hub.

    Files of a folder or pattern come in the order of their names. In a folder, `.json` files count only if
    it holds no other documents: beside others they describe the data.

    Args:
        role: `train`, `validation`, or the option itself.
        option: the option that the user gave the name to, for errors.

    Raises:
        InPlaceTTTError: if nothing has that name, or its files have an unknown format or several.
    """
    path = Path(name).expanduser()
    if reading.format == "hub":
        return Source(role, name, "hub")
    if os.path.isdir(path):
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return Source(role, name, "saved", tuple(sorted(path.rglob("data-*.arrow"))))
        wanted = _documents_in(path, reading, option)
    elif os.path.isfile(path):
        wanted = [path]
    elif os.path.exists(path):
        raise InPlaceTTTError(f"{option}: {name} is {kind_of(path.stat().st_mode)}; give a file or a folder.")
    elif glob.has_magic(name):
        wanted = [Path(f) for f in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(f)]
    else:
        wanted = []
    if wanted:
        return Source(role, name, _common_kind(name, wanted, reading, option), tuple(wanted))
    if _may_be_on_the_hub(name, reading):
        return Source(role, name, "hub")
    what = "no file matches the pattern" if glob.has_magic(name) else "there is no file or folder"
    raise InPlaceTTTError(f"{option}: {what} {name} (looked in {Path.cwd()}); correct the path.")


def _may_be_on_the_hub(name: str, reading: Reading) -> bool:
    return (
        reading.format == "auto"
        and _HUB_NAME.fullmatch(name) is not None
        and not name.startswith(".")
        and _kind(Path(name)) is None
    )


def _documents_in(folder: Path, reading: Reading, option: str) -> list[Path]:
    """Returns the files of a folder that hold documents. Raises InPlaceTTTError if there are none."""
    files = _files_in(folder)
    wanted = [f for f in files if _kind(f) is not None and reading.format in ("auto", _kind(f))]
    if reading.format == "auto":
        wanted = [f for f in wanted if f.suffix.lower() != ".json"] or wanted
    if not wanted:
        endings = [e for e, kind in KINDS.items() if reading.format in ("auto", kind)]
        raise InPlaceTTTError(
            f"{option}: the folder {folder} holds no documents ({len(files)} files, none ending in "
            f"{', '.join(sorted(endings))})."
        )
    return wanted


def _files_in(folder: Path) -> list[Path]:
    """Returns the files in a folder and below, sorted, without hidden ones."""
    found: list[Path] = []
    entries = 0
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in names if not name.startswith(".")]
        entries += len(folders) + len(names)
        if entries > _MOST_ENTRIES:
            raise InPlaceTTTError(
                f"{folder} holds more than {_MOST_ENTRIES:,} files; name the texts themselves, or a folder "
                "of them."
            )
    return sorted(file for file in found if os.path.isfile(file))


def is_compressed(file: Path) -> bool:
    return file.suffix.lower().removeprefix(".") in _COMPRESSED


def _kind(file: Path) -> str | None:
    """Returns the loader for a file's ending, None if the ending is unknown."""
    endings = file.name.lower().split(".")[1:]
    while endings and endings[-1] in _COMPRESSED:
        endings.pop()
    return KINDS.get(endings[-1]) if endings else None


def _common_kind(name: str, files: list[Path], reading: Reading, option: str) -> str:
    """Returns the one loader of all files. Raises InPlaceTTTError if there are several or none."""
    if reading.format != "auto":
        return reading.format
    remedy = f"set {reading.format_option}, or " if reading.format_option else ""
    kinds = Counter(_kind(file) or _unknown(file, reading) for file in files)
    if None in kinds:
        unknown = next(file for file in files if _kind(file) is None)
        raise InPlaceTTTError(
            f"{option}: the ending of {unknown} names no format that is read here; {remedy}give texts that end "
            f"in {', '.join(sorted(KINDS))}."
        )
    if len(kinds) > 1:
        found = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        raise InPlaceTTTError(
            f"{option}: {name} holds files of several formats ({found}); {remedy}name those of one format."
        )
    (kind,) = kinds
    assert kind is not None
    if kind == "text" and (lines := next((f for f in files if _is_json_lines(f)), None)) is not None:
        raise InPlaceTTTError(f"{option}: {lines} holds JSON lines, not text; give it the ending .jsonl.")
    return kind


def _unknown(file: Path, reading: Reading) -> str | None:
    """Returns the loader of a file whose ending is unknown: text if nobody can set the format."""
    is_other = file.suffix.lower().removeprefix(".") in _OTHER_FORMATS
    return None if reading.format_option or is_other else "text"


def _is_json_lines(file: Path) -> bool:
    """True for a file that begins as JSON lines do: with an object that its first line holds whole."""
    if is_compressed(file):
        return False
    try:
        with open(file, "rb") as opened:
            first = opened.readline(_PROBED_BYTES)
    except OSError:  # the reader reports it
        return False
    try:
        return first.startswith(b"{") and isinstance(parse_json(first.decode()), dict)
    except ValueError:
        return False


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
        if columns is None:  # a stream tells its columns by its first record
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
    raise InPlaceTTTError(
        f"the records of {source.name} have no field {wanted[min(1, len(wanted) - 1)]!r} (they have "
        f"{', '.join(map(repr, columns[:_SHOWN]))}{', …' * (len(columns) > _SHOWN)}); set {reading.field_option}."
    )


def _open(source: Source, reading: Reading, streaming: bool) -> Records:
    from datasets import load_dataset, load_from_disk

    if source.kind == "saved":
        saved: Any = load_from_disk(source.name)
        saved = saved[reading.split] if isinstance(saved, dict) else saved
        return saved.to_iterable_dataset() if streaming else saved
    if source.kind == "hub":
        named = _HUB_NAME.fullmatch(source.name)
        where = named.groupdict() if named else {"name": source.name}
        split = where.get("split") or reading.split
        return load_dataset(
            where["name"], where.get("config"), split=split, streaming=streaming, cache_dir=reading.cache
        )
    return _open_files(source.kind, source.files, reading, streaming)


def _open_files(
    kind: str, files: Iterable[Path], reading: Reading, streaming: bool, sample_by: str = "document"
) -> Records:
    """Records of files. A text file is one record, or each line of it with sample_by="line"; its BOM is no
    part of the text."""
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
            f"{sources[0].name} is no file or folder here, and no dataset that can be read from the hub "
            f"({_first_line(error)}); "
            "correct the path, or the name (owner/name:config@split)."
        )
    cause = root_cause(error)
    if isinstance(cause, ImportError) and cause.name:
        names = ", ".join(source.name for source in sources)
        return InPlaceTTTError(
            f"{names} takes the package {cause.name}, which is not installed; pip install {cause.name}."
        )
    culprit = _culprit(sources, reading)
    if culprit is None and (differing := _differing_field(sources, reading)) is not None:
        return InPlaceTTTError(f"{differing}; make them alike, or leave that field out of the files.")
    where, error = culprit or (", ".join(source.name for source in sources), root_cause(error))
    if isinstance(error, StopIteration):
        return InPlaceTTTError(f"{where} holds no records; leave it out.")
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return InPlaceTTTError(
            f"{where} is not UTF-8 text ({_first_line(error)}); convert it, or leave it out."
        )
    return InPlaceTTTError(f"{where} cannot be read: {_first_line(error)}; mend it, or leave it out.")


def _culprit(sources: Sequence[Source], reading: Reading) -> tuple[str, BaseException] | None:
    """The first file that cannot be read on its own, and why."""
    for source in sources:
        for file in source.files if source.kind not in ("saved", "hub") else ():
            try:
                for _ in _open_files(source.kind, [file], reading, streaming=True):
                    pass
            except Exception as error:
                return str(file), root_cause(error)
    return None


def _differing_field(sources: Sequence[Source], reading: Reading) -> str | None:
    """Returns the first field that has different types in two files, which are readable alone but not together."""
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

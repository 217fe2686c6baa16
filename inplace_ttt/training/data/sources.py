"""Where documents come from: what a recipe names, found and opened through `datasets`."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import InPlaceTTTError
from ...files.text import UTF8
from ..recipe.data_section import Data
from .json_lines import field_of_lines, fields_of, holds_lines

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Records: TypeAlias = Dataset | IterableDataset

TOKENS, _TEXT = "input_ids", "text"
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
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@:]+))?(@(?P<split>.+))?")


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.validation` (its role). kind: a datasets loader, "saved"
    (save_to_disk) or "hub"."""

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


def find(names: Iterable[str], format: str, role: str) -> list[Source]:
    """The sources that `data.<role>` names. Files of a folder or pattern come in the order of their names."""
    return [_find(name, format, role) for name in names]


def _find(name: str, format: str, role: str) -> Source:
    key = f"data.{role}"
    path = Path(name).expanduser()
    if format == "hub":
        return Source(role, name, "hub")
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return Source(role, name, "saved", tuple(sorted(path.rglob("data-*.arrow"))))
        files = [
            f
            for f in sorted(path.rglob("*"))
            if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)
        ]
        wanted = [f for f in files if _kind(f) is not None and format in ("auto", _kind(f))]
        if not wanted:
            endings = (
                ", ".join(sorted(KINDS))
                if format == "auto"
                else ", ".join(e for e, kind in KINDS.items() if kind == format)
            )
            raise InPlaceTTTError(
                f"{key}: the folder {name} holds no documents ({len(files)} files, none ending in {endings})."
            )
    elif path.is_file():
        wanted = [path]
    elif glob.has_magic(name) and (
        wanted := [f for f in map(Path, sorted(glob.glob(str(path), recursive=True))) if f.is_file()]
    ):
        pass
    elif format == "auto" and _HUB_NAME.fullmatch(name) and not name.startswith(".") and _kind(path) is None:
        return Source(role, name, "hub")
    else:
        what = "no file matches the pattern" if glob.has_magic(name) else "there is no file or folder"
        raise InPlaceTTTError(f"{key}: {what} {name} (looked in {Path.cwd()}); correct the path.")
    return Source(role, name, _common_kind(name, wanted, format, key), tuple(wanted))


def _kind(file: Path) -> str | None:
    """The loader that a file's ending asks for."""
    endings = file.name.lower().split(".")[1:]
    while endings and endings[-1] in _COMPRESSED:
        endings.pop()
    return KINDS.get(endings[-1]) if endings else None


def _common_kind(name: str, files: list[Path], format: str, key: str) -> str:
    if format != "auto":
        return format
    kinds = Counter(_kind(file) for file in files)
    if None in kinds:
        unknown = next(file for file in files if _kind(file) is None)
        raise InPlaceTTTError(
            f"{key}: the ending of {unknown} names no format that is read here "
            f"({', '.join(sorted(KINDS))}); set data.format."
        )
    if len(kinds) > 1:
        found = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        raise InPlaceTTTError(
            f"{key}: {name} holds files of several formats ({found}); set data.format, or name them by a "
            "pattern."
        )
    (kind,) = kinds
    assert kind is not None
    return kind


def open_source(source: Source, data: Data, streaming: bool) -> tuple[Records, str]:
    """Its records with one column, and that column: the text field that is given, else "input_ids" where they
    hold tokens, else "text"."""
    try:
        lines = source.kind == "json" and all(
            holds_lines(file) for file in source.files if file.stat().st_size
        )
        records: Any = (
            _open_files("text", source.files, data, streaming, "line")
            if lines
            else _open(source, data, streaming)
        )
        columns = fields_of(records) if lines else records.column_names
        if columns is None:  # a stream tells its columns by its first record
            columns = list(next(iter(records), {}))
    except Exception as error:
        raise read_error([source], data, error) from None
    wanted = (TOKENS, _TEXT) if data.text_field is None else (data.text_field,)
    column = next((column for column in wanted if column in columns), None)
    if column is not None and lines:
        return field_of_lines(records, column, column == TOKENS, source.name), column
    if column is not None:
        return records.select_columns([column]), column
    if not columns:
        raise InPlaceTTTError(f"{source.name} holds no records; leave it out.")
    raise InPlaceTTTError(
        f"the records of {source.name} have no field {wanted[-1]!r} (they have "
        f"{', '.join(map(repr, columns))}); set data.text_field."
    )


def _open(source: Source, data: Data, streaming: bool) -> Records:
    from datasets import load_dataset, load_from_disk

    if source.kind == "saved":
        saved: Any = load_from_disk(source.name)
        saved = saved[data.split] if isinstance(saved, dict) else saved
        return saved.to_iterable_dataset() if streaming else saved
    if source.kind == "hub":
        named = _HUB_NAME.fullmatch(source.name)
        where = named.groupdict() if named else {"name": source.name}
        split = where.get("split") or data.split
        return load_dataset(
            where["name"], where.get("config"), split=split, streaming=streaming, cache_dir=data.cache
        )
    return _open_files(source.kind, source.files, data, streaming)


def _open_files(
    kind: str, files: Iterable[Path], data: Data, streaming: bool, sample_by: str = "document"
) -> Records:
    """Records of files. A text file is one record, or each line of it with sample_by="line"; its BOM is no
    part of the text."""
    from datasets import load_dataset

    settings = {"sample_by": sample_by, "encoding": UTF8} if kind == "text" else {}
    paths = [glob.escape(str(file.resolve())) for file in files]
    return load_dataset(
        kind, data_files=paths, split="train", streaming=streaming, cache_dir=data.cache, **settings
    )


def read_error(sources: Sequence[Source], data: Data, error: BaseException) -> InPlaceTTTError:
    """What is wrong with sources that cannot be read, and in which of their files."""
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
    culprit = _culprit(sources, data)
    if culprit is None and (differing := _differing_field(sources, data)) is not None:
        return InPlaceTTTError(f"{differing}; make them alike, or leave that field out of the files.")
    where, error = culprit or (", ".join(source.name for source in sources), root_cause(error))
    if isinstance(error, StopIteration):
        return InPlaceTTTError(f"{where} holds no records; leave it out.")
    if isinstance(error, UnicodeDecodeError) or "UTF8" in str(error):
        return InPlaceTTTError(
            f"{where} is not UTF-8 text ({_first_line(error)}); convert it, or leave it out."
        )
    return InPlaceTTTError(f"{where} cannot be read: {_first_line(error)}; mend it, or leave it out.")


def _culprit(sources: Sequence[Source], data: Data) -> tuple[str, BaseException] | None:
    """The first file that cannot be read on its own, and why."""
    for source in sources:
        for file in source.files if source.kind not in ("saved", "hub") else ():
            try:
                for _ in _open_files(source.kind, [file], data, streaming=True):
                    pass
            except Exception as error:
                return str(file), root_cause(error)
    return None


def _differing_field(sources: Sequence[Source], data: Data) -> str | None:
    """Of files that can be read on their own and not together: two whose first records have other types in a
    field, and which."""
    for source in sources:
        seen: dict[str, tuple[str, Path]] = {}
        for file in source.files if source.kind not in ("saved", "hub") else ():
            with suppress(Exception):
                for column, value in next(
                    iter(_open_files(source.kind, [file], data, streaming=True)), {}
                ).items():
                    kind, first = seen.setdefault(column, (type(value).__name__, file))
                    if value is not None and kind not in ("NoneType", type(value).__name__):
                        return (
                            f"the field {column!r} is {kind} in {first} and {type(value).__name__} in {file}"
                        )
    return None


def root_cause(error: BaseException) -> BaseException:
    """What `datasets` wraps in errors of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;")

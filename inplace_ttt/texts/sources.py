"""Finds the files or datasets that a name stands for."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError
from ..files.paths import kind_of
from .json_lines import holds_lines

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
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^@:]+))?(@(?P<split>.+))?")


_MOST_ENTRIES = 200_000
"""Most files that are searched in a folder. A folder with more is probably a whole disk."""


@dataclass(frozen=True)
class Reading:
    """Settings with which sources are read.

    Attributes:
        format: a loader of `datasets` for every file; "auto" goes by each file's ending.
        text_field: the field of a record that holds its text. None takes `input_ids`, `text` or `messages`,
            the first that a record has.
        split: split of a dataset, unless its name gives one.
        cache: folder in which `datasets` keeps converted files; None for its own.
        field_option, format_option: options with which the user sets `text_field` and `format`, for errors.
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


def find(name: str, reading: Reading, option: str) -> Source:
    """Returns the source that a name stands for: a file, a folder, a glob pattern or a dataset of the hub.

    Files of a folder or pattern come in the order of their names. In a folder, `.json` files count only if
    it holds no other documents. Otherwise they describe the data.

    Args:
        name: the name that the user gave.
        reading: how sources are read.
        option: the option or setting in which the user gave the name.

    Raises:
        InPlaceTTTError: if nothing has that name, or its files have an unknown format or several formats.
    """
    path, role = Path(name).expanduser(), option.removeprefix("data.")
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
    what = (
        f"no file matches the pattern {name}"
        if glob.has_magic(name)
        else f"the file or folder {name} does not exist"
    )
    raise InPlaceTTTError(f"{option}: {what} (looked in {Path.cwd()}); correct the path.")


def _may_be_on_the_hub(name: str, reading: Reading) -> bool:
    return (
        reading.format == "auto"
        and HUB_NAME.fullmatch(name) is not None
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
            f"{option}: the ending of {unknown} is not that of a known format; {remedy}give texts that "
            f"end in {', '.join(sorted(KINDS))}."
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
    """Returns the loader of a file whose ending is unknown: text if the user cannot set the format."""
    is_other = file.suffix.lower().removeprefix(".") in _OTHER_FORMATS
    return None if reading.format_option or is_other else "text"


def _is_json_lines(file: Path) -> bool:
    """Returns True if a file with the ending of a text holds JSON lines."""
    if is_compressed(file):
        return False
    with suppress(OSError), open(file, "rb") as opened:  # the reader reports the error
        return opened.read(1) == b"{" and holds_lines(file)
    return False

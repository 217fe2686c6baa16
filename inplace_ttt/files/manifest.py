"""Records the files that this package wrote, and decides whether an output may be replaced.

Every output folder holds a manifest: its kind, and its files with size and time of the last change. A file is
ours as long as it matches the manifest. Every other file belongs to the user, and is never replaced or
removed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import InPlaceTTTError
from .json_files import read_json, write_json
from .paths import kind_of
from .schema import Open, from_values

MANIFEST = ".inplace-ttt.json"
CHECKPOINT, TRAINED, DIAGNOSIS, EVALUATION, SAMPLES = (
    "converted checkpoint",
    "trained checkpoint",
    "diagnosis",
    "evaluation",
    "samples",
)
"""Kinds of output folders. Each replaces only its own kind."""
STEP, TEMPORARY = "step of a training run", "temporary folder"

Sources = Iterable[str | os.PathLike[str] | None]
"""Files and folders that a command reads. Hub ids and None are skipped."""


@dataclass(frozen=True)
class _Manifest(Open):
    """The contents of a manifest.

    Attributes:
        kind: kind of the folder's output.
        files: path in the folder -> `file_state` when it was written; None accepts any state.
    """

    kind: str
    files: dict[str, list[int] | None]


def write_manifest(folder: Path, kind: str) -> None:
    """Records every file under `folder` as ours.

    For a step of a training run only names are recorded, so that a damaged step can be written again.
    """
    _write(
        folder,
        kind,
        {name: None if kind == STEP else file_state(folder / name) for name in _files_under(folder)},
    )


def update_manifest(file: Path) -> None:
    """Records the new state of a file that this package rewrote in one of its folders."""
    manifest = _read(file.parent)
    if manifest is not None and file.name in manifest.files:
        _write(file.parent, manifest.kind, {**manifest.files, file.name: file_state(file)})


def file_state(file: Path) -> list[int]:
    """Returns a file's size in bytes and the time of its last change in nanoseconds."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def kind_in(folder: Path) -> str | None:
    """Returns the kind of output in a folder; None if this package did not write it."""
    manifest = _read(folder)
    return None if manifest is None else manifest.kind


def recorded(folder: Path) -> dict[str, list[int] | None]:
    """Returns the manifest's files with their recorded states; empty without a manifest."""
    manifest = _read(folder)
    return {} if manifest is None else manifest.files


def foreign_entry(folder: Path) -> str | None:
    """Returns the first entry of `folder` that this package did not write, or that was changed since.

    Folders count as entries unless they hold files of the manifest. Returns None without such an entry.
    """
    known = recorded(folder)
    folders = {parent.as_posix() for name in known for parent in Path(name).parents}
    for root, below, names in os.walk(folder):
        for name in sorted(below + names):
            entry = Path(root) / name
            place = entry.relative_to(folder).as_posix()
            if place == MANIFEST or (place in folders and entry.is_dir() and not entry.is_symlink()):
                continue
            if place not in known or not _is_as_known(entry, known[place]):
                return place
    return None


def remove_written(folder: Path) -> str | None:
    """Removes the files that this package wrote in `folder`, then the folder if it is empty.

    Returns:
        The first entry that remains, or None.
    """
    for name, known in recorded(folder).items():
        if _is_as_known(folder / name, known):
            (folder / name).unlink()
    left = next(_files_under(folder), None)
    if kind_in(folder) is not None:
        (folder / MANIFEST).unlink(missing_ok=True)
    for root, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(root)
    return left


def refuse_to_replace(
    path: str | os.PathLike[str], kind: str, overwrite: bool = False, sources: Sources = ()
) -> None:
    """Checks that an output folder can be written.

    Args:
        path: the folder to write.
        kind: kind of output.
        overwrite: True if the user asked to replace an earlier output.
        sources: inputs of the command. An output may not be one of them, lie in one, or enclose one.

    Raises:
        InPlaceTTTError: if `path` is a file, a source, or a folder that is not entirely our output of this
            kind.
    """
    target = Path(os.path.realpath(path))
    refuse_sources(path, sources)
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise InPlaceTTTError(f"{path} is {_kind(target)}, not a folder; choose another name.")
    if not overwrite:
        raise InPlaceTTTError(
            f"{path} exists already; choose another name, or pass --overwrite to replace it."
        )
    if target in (Path.cwd(), *Path.cwd().parents):
        raise InPlaceTTTError(
            f"{path} is the folder you are in, or one above it, so it is not replaced; choose another name."
        )
    refuse_foreign(path, kind)
    for root, _, _ in os.walk(target):
        _refuse_read_only(root)


def refuse_foreign(path: str | os.PathLike[str], kind: str) -> None:
    """Raises InPlaceTTTError unless a folder is empty or entirely our output of this kind.

    Args:
        path: existing folder.
        kind: kind of output.
    """
    folder = Path(path)
    found, entry = kind_in(folder), foreign_entry(folder)
    if found is None and entry is not None:
        raise InPlaceTTTError(
            f"{path} is not an output of inplace-ttt, so it is not replaced; choose another name, or "
            "remove it yourself."
        )
    if found not in (None, kind):
        raise InPlaceTTTError(
            f"{path} is a {found}, not a {kind}, so it is not replaced; choose another name, or remove it "
            "yourself."
        )
    if entry is not None:
        raise InPlaceTTTError(
            f"{path} holds {entry}, which inplace-ttt did not write or which was changed since; move it "
            "away, or choose another name."
        )


def refuse_sources(path: str | os.PathLike[str], sources: Sources) -> None:
    """Raises InPlaceTTTError if an output is a source of the same command, lies in one, or encloses one.

    Args:
        path: the output.
        sources: inputs of the command.
    """
    target = Path(os.path.realpath(path))
    for source in sources:
        if source is None or not os.path.lexists(source):
            continue
        read = Path(os.path.realpath(source))
        if target == read:
            raise InPlaceTTTError(
                f"{path} is an input of this command, so it is not written; choose another name."
            )
        if target.is_relative_to(read) or read.is_relative_to(target):
            where = "lies in" if target.is_relative_to(read) else "holds"
            raise InPlaceTTTError(
                f"{path} {where} {source}, which the command reads; choose a place outside it."
            )


def refuse_file(path: str | os.PathLike[str], ours: bool) -> None:
    """Raises InPlaceTTTError if an output file would replace anything but an empty file or an earlier output.

    Args:
        path: the file to write.
        ours: True if an existing file is an earlier output of the caller.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise InPlaceTTTError(f"cannot write {path}: it is {_kind(target)}, not a file; choose another name.")
    if target.exists() and target.stat().st_size and not ours:
        raise InPlaceTTTError(
            f"{path} is a file that this command did not write, so it is not replaced; choose another name."
        )
    if target.exists():
        _refuse_read_only(path)


def refuse_changed_link(file: Path, known: list[int] | None) -> None:
    """Raises InPlaceTTTError for a hard link that was written through since it was made.

    Args:
        file: the file to check.
        known: its `file_state` when it was linked; None if not recorded.
    """
    if known is not None and file.stat().st_nlink > 1 and file_state(file) != known:
        raise InPlaceTTTError(
            f"{file} was changed after it was linked here: another folder shares the file, and it was "
            "overwritten; convert again."
        )


def _refuse_read_only(path: str | os.PathLike[str]) -> None:
    """Raises InPlaceTTTError for a protected file or folder: no write bit, or none for this user."""
    if not os.stat(path).st_mode & 0o222 or not os.access(path, os.W_OK):
        raise InPlaceTTTError(
            f"{path} is read-only, so it is not replaced; choose another name, or make it writable."
        )


def _write(folder: Path, kind: str, files: dict[str, list[int] | None]) -> None:
    write_json(folder / MANIFEST, {"kind": kind, "files": files})


def _read(folder: Path) -> _Manifest | None:
    """Returns a folder's manifest; None if there is none or it cannot be read."""
    try:
        return from_values(_Manifest, read_json(folder / MANIFEST, "no manifest"), MANIFEST)
    except InPlaceTTTError:
        return None


def _is_as_known(file: Path, known: list[int] | None) -> bool:
    """Returns True for a file in its recorded state.

    A hard link also counts after it was written through, because removing it loses nothing.
    """
    return (
        file.is_file()
        and not file.is_symlink()
        and (known is None or file.stat().st_nlink > 1 or file_state(file) == known)
    )


def _files_under(folder: Path) -> Iterator[str]:
    """Yields every file and link under `folder` except the manifest, relative to it."""
    for root, below, names in os.walk(folder):
        links = [name for name in below if os.path.islink(os.path.join(root, name))]
        for name in sorted([*names, *links]):
            place = (Path(root) / name).relative_to(folder).as_posix()
            if place != MANIFEST:
                yield place


def _kind(path: Path) -> str:
    mode = path.stat().st_mode
    return "a file" if stat.S_ISREG(mode) else kind_of(mode)

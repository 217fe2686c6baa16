"""Which files this package wrote, and the one decision about what an output may replace.

Every output folder holds a manifest: its kind, and its files with size and time of the last change. A file
counts as ours while it is as the manifest has it. Everything else is somebody's own: it is never replaced and
never removed.
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
"""Kinds of output folders: each takes the place of its own kind alone."""
STEP, TEMPORARY = "step of a training run", "temporary folder"

Sources = Iterable[str | os.PathLike[str] | None]
"""Files and folders that a command reads; hub ids and None are passed over."""


@dataclass(frozen=True)
class _Manifest(Open):
    """kind: what the folder is. files: path in the folder -> `file_state` when it was written; None where any
    state will do."""

    kind: str
    files: dict[str, list[int] | None]


def write_manifest(folder: Path, kind: str) -> None:
    """Record every file under `folder` as ours. A run's step is known by names alone: a damaged one is
    written again."""
    _write(
        folder,
        kind,
        {name: None if kind == STEP else file_state(folder / name) for name in _files_under(folder)},
    )


def update_manifest(file: Path) -> None:
    """Record a file anew that this package has just rewritten in one of its own folders."""
    manifest = _read(file.parent)
    if manifest is not None and file.name in manifest.files:
        _write(file.parent, manifest.kind, {**manifest.files, file.name: file_state(file)})


def file_state(file: Path) -> list[int]:
    """Bytes of a file, and the nanosecond of its last change."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def kind_in(folder: Path) -> str | None:
    """The kind of output that a folder is; None for one that is not ours."""
    manifest = _read(folder)
    return None if manifest is None else manifest.kind


def recorded(folder: Path) -> dict[str, list[int] | None]:
    """The manifest's files and their states as they were written; empty without a manifest."""
    manifest = _read(folder)
    return {} if manifest is None else manifest.files


def foreign_entry(folder: Path) -> str | None:
    """Return the first entry of `folder` that this package did not write or that was changed since, None
    where there is none.

    Folders are entries, too, unless they hold files of the manifest.
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
    """Remove what this package wrote in `folder`, and the folder where nothing else is in it. Returns an
    entry that stays, if any."""
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
    """Refuse an output folder whose place is taken: by a file, by a source, or by a folder that is not wholly
    our output of this kind.

    Args:
        path: the folder to write.
        kind: of output.
        overwrite: True where the user asked to replace an earlier output.
        sources: files and folders that the command reads; an output is not one of them, not in one, and not
            around one.
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
    """Refuse a folder that is another kind of output, or holds anything that this package did not write. An
    empty one passes."""
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
    """Refuse an output that is a source of the same command, lies in one, or would enclose one."""
    target = Path(os.path.realpath(path))
    for source in sources:
        if source is None or not os.path.lexists(source):
            continue
        read = Path(os.path.realpath(source))
        if target == read:
            raise InPlaceTTTError(
                f"{path} is what the command reads, so it is not written; choose another name."
            )
        if target.is_relative_to(read) or read.is_relative_to(target):
            where = "lies in" if target.is_relative_to(read) else "holds"
            raise InPlaceTTTError(
                f"{path} {where} {source}, which the command reads; choose a place outside it."
            )


def refuse_file(path: str | os.PathLike[str], ours: bool) -> None:
    """Refuse an output file whose place is taken by anything but an empty file or an earlier output
    (`ours`)."""
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
    """Refuse a hard link, whose state was recorded when it was made, that was written through."""
    if known is not None and file.stat().st_nlink > 1 and file_state(file) != known:
        raise InPlaceTTTError(
            f"{file} was changed after it was linked here: the file that it shares with another folder was "
            "written over; convert again."
        )


def _refuse_read_only(path: str | os.PathLike[str]) -> None:
    """Refuse what somebody has protected: no write bit at all, or none for this user."""
    if not os.stat(path).st_mode & 0o222 or not os.access(path, os.W_OK):
        raise InPlaceTTTError(
            f"{path} is read-only, so it is not replaced; choose another name, or make it writable."
        )


def _write(folder: Path, kind: str, files: dict[str, list[int] | None]) -> None:
    write_json(folder / MANIFEST, {"kind": kind, "files": files})


def _read(folder: Path) -> _Manifest | None:
    """A folder's manifest; None where it has none, or none that can be read."""
    try:
        return from_values(_Manifest, read_json(folder / MANIFEST, "no manifest"), MANIFEST)
    except InPlaceTTTError:
        return None


def _is_as_known(file: Path, known: list[int] | None) -> bool:
    """True for a file as it was written. A hard link counts whatever was written through it: removing it
    loses nothing."""
    return (
        file.is_file()
        and not file.is_symlink()
        and (known is None or file.stat().st_nlink > 1 or file_state(file) == known)
    )


def _files_under(folder: Path) -> Iterator[str]:
    """Every entry under `folder` but the manifest that is no folder, relative to it."""
    for root, below, names in os.walk(folder):
        links = [name for name in below if os.path.islink(os.path.join(root, name))]
        for name in sorted([*names, *links]):
            place = (Path(root) / name).relative_to(folder).as_posix()
            if place != MANIFEST:
                yield place


def _kind(path: Path) -> str:
    mode = path.stat().st_mode
    return "a file" if stat.S_ISREG(mode) else kind_of(mode)

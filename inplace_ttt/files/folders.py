"""Outputs that are either whole or not there, written by one run at a time; no folder of anybody else's is ever replaced."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import InPlaceTTTError, one_line
from .locks import output_lock
from .paths import require_regular

Ours = Callable[[Path], Collection[str] | None]
"""Says of a folder that is there what in it this package wrote, as patterns of file names; None where it is none of its outputs."""


def marked(mark: str, *others: str) -> Ours:
    """Outputs that are known by a file of theirs, with what else such a folder holds."""
    return lambda folder: (mark, *others) if (folder / mark).is_file() else None


@contextmanager
def new_folder(path: str | os.PathLike[str], *, overwrite: bool = False, ours: Ours = lambda folder: None) -> Iterator[Path]:
    """A temporary sibling to write into, which gets the name `path` at the end; an interruption or an error leaves nothing.

    At every moment `path` is the old folder or the new one, whole, even if the process is killed; where the system cannot
    exchange two names in one step, the next writer puts the old one back. Raises InPlaceTTTError when `path` exists and
    `overwrite` is off or it holds what is not `ours`, when another run writes it, or when the disk refuses.
    """
    refuse_to_replace(path, overwrite, ours)
    target = Path(os.path.realpath(path))
    partial, replaced = (target.with_name(f".{target.name}.{what}") for what in ("partial", "replaced"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InPlaceTTTError(f"cannot write beside {path}: {error.strerror}; choose a place you may write to.") from None
    with output_lock(path), disk_errors(path):
        _mend(target, partial, replaced)
        refuse_to_replace(path, overwrite, ours)
        partial.mkdir()
        try:
            yield partial
            put_in_place(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def new_file(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[Path]:
    """A temporary sibling to write, which takes the place of the file `path` at the end; else the old file stays as it is.

    wait: for another writer, instead of refusing. Raises InPlaceTTTError for what is there and no file, and as `new_folder`.
    """
    target = Path(os.path.realpath(path))
    require_regular(target, f"cannot write {path}")
    with output_lock(path, wait=wait), disk_errors(path):
        partial = target.with_name(f".{target.name}.partial")
        try:
            yield partial
            partial.chmod(0o666 & ~_umask())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the disk refuses while `path` is written, as one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason, file = getattr(error, "strerror", None) or one_line(error), getattr(error, "filename", None)
        if isinstance(file, str) and not Path(os.path.realpath(file)).is_relative_to(Path(os.path.realpath(path)).parent):
            raise InPlaceTTTError(f"cannot write {path}, which takes {file}: {reason}.") from None
        raise InPlaceTTTError(f"cannot write {path}: {reason}; free some space or choose another place.") from None


def _mend(target: Path, partial: Path, replaced: Path) -> None:
    """What a run that was killed left: its partial folder; the old folder, where nothing else has the name yet."""
    shutil.rmtree(partial, ignore_errors=True)
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)


def put_in_place(partial: Path, target: Path) -> None:
    """Give a folder that has been written its name, in one step where the system can; what has the name goes."""
    replaced = target.with_name(f".{target.name}.replaced")
    if not target.exists():
        partial.rename(target)
    elif exchange(partial, target):
        shutil.rmtree(partial)
    else:
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)


def exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's name in one step; False where this system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    if (code := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))


def refuse_to_replace(path: str | os.PathLike[str], overwrite: bool, ours: Ours = lambda folder: None) -> None:
    """Refuse an output that exists: a file always, a folder unless `overwrite` is on and all in it is `ours`."""
    target = Path(os.path.realpath(path))
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise InPlaceTTTError(f"{path} is a file, not a folder; choose another name.")
    if not overwrite:
        raise InPlaceTTTError(f"{path} exists already; choose another name, or pass --overwrite to replace it.")
    if target in (Path.cwd(), *Path.cwd().parents):
        raise InPlaceTTTError(f"{path} is the folder you are in, or one above it, so it is not replaced; choose another name.")
    found = sorted(entry.name for entry in target.iterdir())
    known = ours(target)
    if found and known is None:
        raise InPlaceTTTError(f"{path} holds no output of this command, so it is not replaced; choose another name, or remove it yourself.")
    if others := [name for name in found if not any(fnmatch(name, pattern) for pattern in known or ()) or (target / name).is_dir()]:
        raise InPlaceTTTError(f"{path} holds {others[0]}, which this command does not write; move it away, or choose another name.")


def stamp(file: Path) -> list[int]:
    """Bytes of a file, and the nanosecond of its last change."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def refuse_changed_link(file: Path, known: list[int]) -> None:
    """Refuse a hard link, stamped when it was made, that was written through: a copy over the file that it shares changes it too."""
    if file.stat().st_nlink > 1 and stamp(file) != known:
        raise InPlaceTTTError(
            f"{file} was changed after it was linked here: the file that it shares with another folder was written over; convert again."
        )


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy; `source` may be a symbolic link."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def save_tensors(tensors: Mapping[str, Tensor], target: Path) -> None:
    """A safetensors file that others may read as the umask says (the library leaves it to its owner alone)."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, {"format": "pt"})
    target.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Writes outputs that are either complete or absent, one run at a time.

A folder that this package did not write is never replaced.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import InPlaceTTTError, one_line
from .locks import output_lock
from .manifest import MANIFEST, TEMPORARY, Sources, kind_in, refuse_file, refuse_to_replace, write_manifest


@contextmanager
def new_folder(
    path: str | os.PathLike[str], kind: str, *, overwrite: bool = False, sources: Sources = ()
) -> Iterator[Path]:
    """Yields a temporary sibling folder to write into, which is renamed to `path` at the end.

    An interruption or an error leaves nothing behind. At every moment `path` is the complete old folder or
    the complete new one, even if the process is killed. If the system cannot exchange two names in one step,
    the next writer restores the old folder.

    Args:
        path: the folder to write.
        kind: kind of output, one of the constants in `files.manifest`.
        overwrite: replace an earlier output of this kind, if it holds no other files.
        sources: inputs of the command, which must not overlap with `path`.

    Raises:
        InPlaceTTTError: if `path` may not be replaced, another run writes it, or the disk refuses.
    """
    refuse_to_replace(path, kind, overwrite, sources)
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InPlaceTTTError(
            f"cannot write next to {path}: {error.strerror}; choose a place you may write to."
        ) from None
    with output_lock(path), disk_errors(path):
        _restore(target)
        refuse_to_replace(path, kind, overwrite, sources)
        with _partial(target) as partial:
            yield partial
            write_manifest(partial, kind)
            put_in_place(partial, target)


@contextmanager
def new_file(path: str | os.PathLike[str], *, ours: bool, wait: bool = False) -> Iterator[Path]:
    """Yields a temporary file to write, which replaces the file `path` at the end.

    After an error the old file stays unchanged.

    Args:
        path: the file to write.
        ours: True if an existing file of that name is an earlier output of the caller, which may be replaced.
        wait: wait for another writer instead of raising.

    Raises:
        InPlaceTTTError: if `path` is another program's file, another run writes it, or the disk refuses.
    """
    target = Path(os.path.realpath(path))
    refuse_file(path, ours)
    # a folder, because writers may leave temporary files next to their output
    with output_lock(path, wait=wait), disk_errors(path), _partial(target) as folder:
        partial = folder / target.name
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(target)


def require_writable(folder: Path, remedy: str) -> None:
    """Checks that files can be written into a folder. A missing folder is created and removed again.

    Args:
        folder: the folder, which need not exist.
        remedy: end of the error message.

    Raises:
        InPlaceTTTError: if the folder cannot be created or written into.
    """
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InPlaceTTTError(f"cannot write to {folder}: {error.strerror}; {remedy}.") from None
    finally:
        if not there:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises InPlaceTTTError, with one sentence, for errors of the disk while `path` is written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason, file = getattr(error, "strerror", None) or one_line(error), getattr(error, "filename", None)
        if isinstance(file, str) and not Path(os.path.realpath(file)).is_relative_to(
            Path(os.path.realpath(path)).parent
        ):
            raise InPlaceTTTError(f"cannot write {path}, which needs {file}: {reason}.") from None
        raise InPlaceTTTError(
            f"cannot write {path}: {reason}; free some space or choose another place."
        ) from None


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yields an empty folder next to `target`, marked as ours, and removes it afterwards.

    The leftover of a killed run is removed first.
    """
    partial = target.with_name(f".{target.name}.partial")
    remove_leftover(partial)
    partial.mkdir()
    try:
        write_manifest(partial, TEMPORARY)
        yield partial
    finally:
        with suppress(OSError):
            _discard(partial)


def remove_leftover(folder: Path) -> None:
    """Removes the temporary folder of a run that was killed, if there is one.

    Raises:
        InPlaceTTTError: if this package did not write the folder.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir() or (kind_in(folder) is None and any(folder.iterdir())):
        raise InPlaceTTTError(
            f"{folder} is in the way, and inplace-ttt did not write it; move it away, or choose another name."
        )
    _discard(folder)


def _discard(folder: Path) -> None:
    """Removes a folder of ours. Its manifest goes last, so a killed removal leaves it marked as ours."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MANIFEST:
            entry.unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    folder.rmdir()


def _restore(target: Path) -> None:
    """Completes or undoes the replacement that a killed run left half done.

    If `target` is missing, the old folder gets its name back. If not, the old folder is removed.
    """
    replaced = _replaced(target)
    if os.path.lexists(target):
        remove_leftover(replaced)
    elif kind_in(replaced) is not None:
        replaced.rename(target)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def put_in_place(partial: Path, target: Path) -> None:
    """Renames a finished folder to `target`, in one step if the system can.

    The older output at `target` is removed.
    """
    if not target.exists():
        partial.rename(target)
    elif exchange(partial, target):
        _discard(partial)
    else:
        replaced = _replaced(target)
        target.rename(replaced)
        partial.rename(target)
        _discard(replaced)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders in one step; returns False if the system cannot."""
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


def link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link if the file system allows it, else a copy; `source` may be a symbolic link."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def save_tensors(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Writes a safetensors file with the permissions that the umask gives.

    The library itself makes the file readable by its owner only.
    """
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, {"format": "pt"})
    target.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

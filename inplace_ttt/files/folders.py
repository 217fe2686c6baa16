"""Outputs that are either whole or not there, written by one run at a time; no folder of anybody else's is
ever replaced."""

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
    """A temporary sibling to write into, which gets the name `path` at the end; an interruption or an error
    leaves nothing.

    At every moment `path` is the old folder or the new one, whole, even if the process is killed; where the
    system cannot exchange two names in one step, the next writer puts the old one back.

    Args:
        path: the folder to write.
        kind: of output, as `files.manifest` has them.
        overwrite: replace an earlier output of this kind, if nobody has put anything else there.
        sources: what the command reads, which `path` must lie apart from.

    Raises:
        InPlaceTTTError: `path` may not be replaced, another run writes it, or the disk refuses.
    """
    refuse_to_replace(path, kind, overwrite, sources)
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InPlaceTTTError(
            f"cannot write beside {path}: {error.strerror}; choose a place you may write to."
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
    """A temporary sibling to write, which takes the place of the file `path` at the end; else the old file
    stays as it is.

    Args:
        path: the file to write.
        ours: True where a file of that name is an earlier output of the caller, which may be replaced.
        wait: wait for another writer instead of refusing.

    Raises:
        InPlaceTTTError: another's file has the name, another run writes it, or the disk refuses.
    """
    target = Path(os.path.realpath(path))
    refuse_file(path, ours)
    # writers may leave files beside theirs
    with output_lock(path, wait=wait), disk_errors(path), _partial(target) as folder:
        partial = folder / target.name
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(target)


def require_writable(folder: Path, remedy: str) -> None:
    """Refuse a folder that cannot be made or written into, and leave nothing behind: one that is missing is
    made once it is needed."""
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
    """What the disk refuses while `path` is written, as one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason, file = getattr(error, "strerror", None) or one_line(error), getattr(error, "filename", None)
        if isinstance(file, str) and not Path(os.path.realpath(file)).is_relative_to(
            Path(os.path.realpath(path)).parent
        ):
            raise InPlaceTTTError(f"cannot write {path}, which takes {file}: {reason}.") from None
        raise InPlaceTTTError(
            f"cannot write {path}: {reason}; free some space or choose another place."
        ) from None


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`, marked as ours, that is gone afterwards; what a killed run left there
    goes first."""
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
    """Remove a temporary folder of a run that was killed. Raises InPlaceTTTError for one that is not ours."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir() or (kind_in(folder) is None and any(folder.iterdir())):
        raise InPlaceTTTError(
            f"{folder} is in the way, and inplace-ttt did not write it; move it away, or choose another name."
        )
    _discard(folder)


def _discard(folder: Path) -> None:
    """Remove a folder of ours, its manifest last: whatever a kill leaves of it is still known as ours."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MANIFEST:
            entry.unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    folder.rmdir()


def _restore(target: Path) -> None:
    """Undo half a replacement by a killed run: the old folder gets its name back, or goes where the new one
    has the name."""
    replaced = _replaced(target)
    if os.path.lexists(target):
        remove_leftover(replaced)
    elif kind_in(replaced) is not None:
        replaced.rename(target)


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def put_in_place(partial: Path, target: Path) -> None:
    """Give a folder that has been written its name, in one step where the system can; the older output of
    that name goes."""
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


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy; `source` may be a symbolic link."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def save_tensors(tensors: Mapping[str, Tensor], target: Path) -> None:
    """A safetensors file that others may read as the umask says (the library leaves it to its owner
    alone)."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, {"format": "pt"})
    target.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Locks that admit one writer at a time to each output."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InPlaceTTTError

try:
    import fcntl
except ImportError:  # Windows: no locking
    fcntl = None  # type: ignore[assignment]


@contextmanager
def output_lock(path: str | os.PathLike[str], *, wait: bool = False) -> Iterator[None]:
    """Holds the lock of an output. The lock ends with its process, however that ends.

    Args:
        path: file or folder to be written; it need not exist, but its parent must.
        wait: wait for another writer instead of raising.

    Raises:
        InPlaceTTTError: if another process or thread holds the output and `wait` is False.
    """
    target = Path(os.path.realpath(path))
    file = target.with_name(f".{target.name}.lock")
    try:
        handle = _locked(file, wait)
    except OSError as error:
        raise InPlaceTTTError(
            f"cannot write next to {path}: {error.strerror}; choose a place you may write to."
        ) from None
    if handle is None:
        raise InPlaceTTTError(
            f"{path} is being written by another run; wait for its end, or choose another name."
        )
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(file)  # while locked, so that a waiter finds its file gone, and retries
        os.close(handle)


def _locked(file: Path, wait: bool) -> int | None:
    """Returns a descriptor that holds the lock file, or None if another process holds it."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.exists(file) and os.path.samestat(os.fstat(handle), os.stat(file)):
                return handle
        except FileNotFoundError:  # its holder removed it just now
            pass
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(handle)
                return None
            if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # a file system without locks
                return handle
            os.close(handle)
            raise
        os.close(handle)

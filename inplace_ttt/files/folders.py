"""Output folders that are either whole or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import InPlaceTTTError


@contextmanager
def new_folder(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling to write into, renamed to `path` at the end; an interruption or an error leaves nothing.

    Raises InPlaceTTTError when `path` exists and `overwrite` is off, or when the disk refuses.
    """
    target = Path(path).absolute()
    if target.exists() and not overwrite:
        raise InPlaceTTTError(f"{path} exists already; choose another name, or pass --overwrite to replace it.")
    if target.exists() and not target.is_dir():
        raise InPlaceTTTError(f"{path} is a file, not a folder; choose another name.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise InPlaceTTTError(f"cannot write beside {path}: {error.strerror}; choose a place you may write to.") from None
    try:
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        if target.exists():
            replaced = temporary.with_name(f"{temporary.name}-replaced")
            target.rename(replaced)
            temporary.rename(target)
            shutil.rmtree(replaced)
        else:
            temporary.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InPlaceTTTError(f"cannot write {path}: {reason}; free some space or choose another place.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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

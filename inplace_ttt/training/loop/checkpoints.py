"""The checkpoints in a run's output: their names, their files, and which are complete on this disk."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...errors import InPlaceTTTError
from ...files.json_files import read_json
from ...files.manifest import MANIFEST, STEP, kind_in
from ...files.schema import from_values

COMPLETE = "complete"
"""Name of the file that makes a checkpoint count. It lists the checkpoint's files."""


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint's file `complete`.

    Attributes:
        files: path -> bytes of the checkpoint's files on this disk.
        facts: the settings, weights and data that made it.
        changes: settings that were changed at earlier resumes.
        skipped_steps: steps skipped so far.
        ranks: processes whose files are on this disk.
    """

    files: dict[str, int]
    facts: dict[str, Any]
    changes: list[dict[str, Any]] = field(default_factory=list)
    skipped_steps: int = 0
    ranks: list[int] = field(default_factory=list)


def files_in(folder: Path) -> dict[str, int]:
    """Returns path -> bytes of a checkpoint's files that this process can see."""
    found = (
        Path(root) / name
        for root, _, names in os.walk(folder)
        for name in names
        if name not in (COMPLETE, MANIFEST)
    )
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in found}


def mark_complete(folder: Path, saved: Saved) -> None:
    """Writes the file `complete`. The checkpoint counts once it also has its final name."""
    (folder / COMPLETE).write_text(json.dumps(asdict(saved), indent=1) + "\n", encoding="utf-8")


def read_saved(folder: Path) -> Saved:
    """Reads the file `complete`. Raises InPlaceTTTError if it is missing or damaged."""
    file = folder / COMPLETE
    return from_values(Saved, read_json(file, "its list of files is missing or damaged"), str(file))


def fault(folder: Path, readers: Sequence[int] = ()) -> str | None:
    """Returns the fault of a checkpoint on this disk, None if it is complete.

    Args:
        folder: the checkpoint.
        readers: processes that would read it.
    """
    try:
        saved = read_saved(folder)
    except InPlaceTTTError as error:
        return str(error).rstrip(".")
    try:
        here = files_in(folder)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    for name, size in saved.files.items():
        if name not in here:
            return f"it lacks {name}"
        if here[name] != size:
            return f"{name} has {here[name]:,} bytes instead of {size:,}"
    if saved.ranks and not set(readers) <= set(saved.ranks):
        return (
            f"processes {saved.ranks} saved it, but {list(readers)} would read it: give each "
            "node the rank it had"
        )
    return None


def last_checkpoint(output: str | os.PathLike[str]) -> Path | None:
    """Returns the newest complete checkpoint on this disk, None without one."""
    whole = complete_checkpoints(Path(output))
    return whole[-1] if whole else None


def complete_checkpoints(output: Path) -> list[Path]:
    """Returns the complete checkpoints on this disk, oldest first."""
    return [
        folder
        for _, folder in sorted(folders(output).items())
        if kind_in(folder) == STEP and fault(folder) is None
    ]


def last_step(output: Path) -> int:
    """Returns the step of the newest complete checkpoint on this disk, 0 without one."""
    last = last_checkpoint(output)
    return 0 if last is None else int(last.name.rpartition("-")[2])


def folder_of(output: Path, step: int) -> Path:
    return output / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def folders(output: Path) -> dict[int, Path]:
    """Returns step -> folder for every folder with a checkpoint's name."""
    return {step: entry for step, entry in named(output).items() if entry.is_dir()}


def named(output: Path) -> dict[int, Path]:
    """Returns step -> path for everything with a checkpoint's name.

    The result is empty if the output is missing, or another rank removes it meanwhile.
    """
    try:
        found = sorted(
            (folder.name.rpartition("-")[2], folder) for folder in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        )
    except FileNotFoundError:
        found = []
    return {int(step): entry for step, entry in found if step.isdecimal()}

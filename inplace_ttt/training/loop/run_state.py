"""The state of a run, read from its output folder.

The state shows which checkpoints are complete, where to resume, and whether the run is finished. It stays
consistent whenever the run is killed:

- A file `.inplace-ttt-run` marks the folder as a run's own. Without this mark, no file in the folder
  counts as a run's, whatever its name.
- A checkpoint is saved under `.saving/` and gets its name once it is complete. Its file `complete` lists
  every file with its size, the recipe, and the settings that were changed.
- A file `.from-scratch` marks all checkpoints in the folder as given up, until the run has removed them.
- A run is finished once `train_report.json` reports all steps. It is written after `final/`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InPlaceTTTError
from ...files.folders import disk_errors, require_writable
from ...files.json_files import read_json
from ...files.locks import output_lock
from ...files.manifest import STEP, TRAINED, kind_in, refuse_foreign, refuse_sources, remove_written
from ..recipe.changes import changes, refuse_other_results
from ..recipe.recipe import Recipe
from .checkpoints import COMPLETE, Saved, fault, folder_of, folders, last_step, named, read_saved
from .meeting import Meeting

logger = logging.getLogger(__name__)

REPORT, FINAL, LOG, SAVING = "train_report.json", "final", "log.jsonl", ".saving"
_GIVEN_UP, _SHOWN, _MARK = ".from-scratch", ".process-", ".inplace-ttt-run"
_NAMES = (REPORT, LOG, "audit.html", "audit.json", "audit.md", "diagnose", "tensorboard")
"""Other files and folders of a run's output, besides checkpoints and `final`."""


@dataclass(frozen=True)
class Start:
    """The start of a run, as all its processes have agreed.

    Attributes:
        place: the lowest rank that sees this process's output.
        leads: True if this process has that rank. It then manages the files of the output.
        one_disk: True if all processes see the same output.
        checkpoint: the checkpoint to resume from, or None.
        done: steps of that checkpoint.
        report: the report if the run is finished, else None.
    """

    place: int
    leads: bool
    one_disk: bool
    checkpoint: Path | None = None
    done: int = 0
    report: dict[str, Any] | None = None


@contextmanager
def held(recipe: Recipe, resume: bool) -> Iterator[None]:
    """Locks the output for one run. The lock ends with this process.

    Args:
        recipe: the run's recipe.
        resume: the run may resume, so its checkpoints may stay.

    Raises:
        InPlaceTTTError: if another run holds the lock, or this run would replace files that no run wrote.
    """
    output = Path(recipe.output)
    if not (resume and finished(recipe)):
        refuse_others(recipe, last_step(output) if resume else 0)
    require_writable(output, "choose another output")
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    with output_lock(output):
        try:
            yield
        finally:
            with suppress(OSError):
                output.rmdir()  # if nothing was written


def refuse_others(recipe: Recipe, done: int) -> None:
    """Refuses an output in which the run would replace one of its sources, or files that no run wrote.

    Args:
        recipe: the run's recipe.
        done: steps of the checkpoint to resume from; later checkpoints are written again.

    Raises:
        InPlaceTTTError: if there is such a file; the message has its path.
    """
    output = Path(recipe.output)
    model = recipe.model
    read = [model.path, model.tokenizer, *recipe.data.train, *recipe.data.validation]
    written = [output / FINAL, *(entry for step, entry in named(output).items() if step > done)]
    for source in filter(os.path.lexists, filter(None, read)):
        if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(source)):
            raise InPlaceTTTError(
                f"the run's output {output} is or lies in {source}, which the run reads; choose another "
                "output."
            )
        for folder in (output / FINAL, *named(output).values()):  # the run removes older checkpoints
            refuse_sources(folder, [source])
    if os.path.lexists(output) and not output.is_dir():
        raise InPlaceTTTError(f"the run's output {output} is a file, not a folder; choose another output.")
    if not (output / _MARK).exists():
        taken = [name for name in _NAMES if os.path.lexists(output / name)]
        if taken:
            raise InPlaceTTTError(
                f"{output} holds {taken[0]}, which no run wrote; move it away, or choose another output."
            )
    for folder in written:
        if os.path.lexists(folder):
            if not folder.is_dir() or folder.is_symlink():
                raise InPlaceTTTError(
                    f"{folder} is in the way, and no run wrote it; move it away, or choose another output."
                )
            refuse_foreign(folder, TRAINED if folder.name == FINAL else STEP)


def claim(output: Path) -> None:
    """Marks the output as a run's own. Call it before the first file is written there."""
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        (output / _MARK).touch()


def finished(recipe: Recipe) -> dict[str, Any] | None:
    """Returns the report of a finished run, None if steps remain.

    Raises:
        InPlaceTTTError: if a run with other settings or more steps finished there.
    """
    output = Path(recipe.output)
    if not (output / FINAL).is_dir() or not (output / REPORT).is_file() or (output / _GIVEN_UP).exists():
        return None
    try:
        report = read_json(output / REPORT, "the run's report")
        steps, old = int(report["steps"]), dict(report["recipe"])
    except (InPlaceTTTError, KeyError, TypeError, ValueError):
        return None
    if steps < recipe.steps:
        return None
    if steps > recipe.steps:
        raise _too_far(str(output), steps, recipe)
    refuse_other_results(old, recipe, str(output))
    return report


def agree(recipe: Recipe, meeting: Meeting, resume: bool) -> Start:
    """Finds the newest checkpoint that is complete on every disk of the run.

    It changes no file; `settle` does, once nothing can be refused anymore. All processes must call it.

    Args:
        recipe: the run's recipe.
        meeting: the run's processes.
        resume: look for a checkpoint; otherwise the run starts anew.

    Raises:
        InPlaceTTTError: if there are checkpoints and none is complete; the message names the missing files.
    """
    output = Path(recipe.output)
    place = _place(meeting, output)
    places = meeting.gather("places", place)
    leads, one_disk, report = place == meeting.rank, len(set(places)) == 1, None
    readers = () if one_disk else [rank for rank, other in enumerate(places) if other == place]
    mine: dict[str, Any] = {"host": socket.gethostname(), "finished": False, "whole": [], "broken": {}}
    if resume:
        if leads:
            report = finished(recipe)
            mine["finished"] = report is not None
        if leads and not (output / _GIVEN_UP).exists():
            faults = {
                step: fault(folder, readers)
                for step, folder in folders(output).items()
                if (folder / COMPLETE).exists()
            }
            mine["whole"] = [step for step, problem in faults.items() if problem is None]
            mine["broken"] = {str(step): problem for step, problem in faults.items() if problem is not None}
    views = meeting.gather("checkpoints", mine)
    leaders = {rank: view for rank, view in enumerate(views) if places[rank] == rank}
    if any(view["finished"] for view in views):  # only the disk of that run's process 0 has the report
        return Start(place, leads, one_disk, report=report or {})
    step = _newest(output, leaders, meeting.rank == 0)
    if step is None:
        return Start(place, leads, one_disk)
    if step > recipe.steps:
        raise _too_far(str(folder_of(output, step)), step, recipe)
    return Start(place, leads, one_disk, folder_of(output, step), step)


def settle(start: Start, output: Path, from_scratch: bool) -> None:
    """Removes the files of an earlier run that this run does not continue from.

    Complete checkpoints up to `start.done` stay, and the log's lines up to that step.

    Args:
        start: the start that the processes agreed on.
        output: the run's output.
        from_scratch: remove all checkpoints.
    """
    if not start.leads:
        return
    claim(output)
    shutil.rmtree(output / SAVING, ignore_errors=True)  # from a run that was killed while it saved
    if from_scratch:
        (output / _GIVEN_UP).touch()
    given_up = (output / _GIVEN_UP).exists()
    for step, folder in folders(output).items():
        if kind_in(folder) == STEP and (given_up or step > start.done or fault(folder) is not None):
            (folder / COMPLETE).unlink(missing_ok=True)
            remove_written(folder)
    if given_up:
        (output / REPORT).unlink(missing_ok=True)
    for left in output.glob(f"{_SHOWN}*"):
        left.unlink(missing_ok=True)
    # a comparison before the first step has step 0, hence -1
    shorten_log(output / LOG, -1 if given_up or not start.done else start.done)
    (output / _GIVEN_UP).unlink(missing_ok=True)


def made_by(start: Start, facts: dict[str, Any]) -> Saved:
    """Returns the contents of `complete` for the run's checkpoints, without their files.

    Args:
        start: the start that the processes agreed on.
        facts: settings, weights and data of the run (`changes.facts_of`).

    Raises:
        InPlaceTTTError: if the checkpoint to resume from was made with settings that cannot change.
    """
    if start.checkpoint is None:
        return Saved({}, facts)
    before = read_saved(start.checkpoint)
    new = [
        {"after_step": start.done, **change} for change in changes(before.facts, facts, str(start.checkpoint))
    ]
    return Saved({}, facts, [*before.changes, *new], before.skipped_steps)


def _place(meeting: Meeting, output: Path) -> int:
    """Returns the lowest rank whose output this process sees.

    The first process of each node creates a file there, and every process looks for these files.
    """
    on_one_node = (
        int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 0) == meeting.world
    )
    if on_one_node:
        return 0
    name = f"{_SHOWN}{uuid.uuid4().hex}" if os.environ.get("LOCAL_RANK", "0") == "0" else None
    try:
        if name is not None:
            with disk_errors(output):
                output.mkdir(parents=True, exist_ok=True)
                (output / name).touch()
        shown = meeting.gather("shown", name)
        seen = [rank for rank, shows in enumerate(shown) if shows is not None and (output / shows).exists()]
        meeting.gather("seen")
        return min(seen, default=meeting.rank)
    finally:
        if name is not None:
            (output / name).unlink(missing_ok=True)


def _newest(output: Path, leaders: dict[int, dict[str, Any]], says: bool) -> int | None:
    """Returns the newest step whose checkpoint is complete in every place, None without checkpoints.

    Raises InPlaceTTTError if there are checkpoints and none is complete everywhere.
    """
    known = {int(step) for view in leaders.values() for step in [*view["whole"], *view["broken"]]}
    usable = known.intersection(*(view["whole"] for view in leaders.values()))
    lacking = {step: _who_lacks(leaders, step) for step in known - usable}
    if known and not usable:
        newest = max(known)
        raise InPlaceTTTError(
            f"{folder_of(output, newest)} is not complete, nor is any other checkpoint: {lacking[newest]}; "
            "bring it back, or start "
            "anew with --from-scratch."
        )
    if not usable:
        return None
    step = max(usable)
    for broken in sorted(other for other in lacking if other > step and says):
        logger.warning(
            "%s is not complete: %s; the run continues from %s",
            folder_of(output, broken),
            lacking[broken],
            folder_of(output, step),
        )
    return step


def _who_lacks(leaders: dict[int, dict[str, Any]], step: int) -> str:
    rank, view = next((rank, view) for rank, view in leaders.items() if step not in view["whole"])
    problem = view["broken"].get(str(step), "it is not there")
    return problem if len(leaders) == 1 else f"on {view['host']}, which process {rank} reads from, {problem}"


def _too_far(where: str, steps: int, recipe: Recipe) -> InPlaceTTTError:
    return InPlaceTTTError(
        f"{where} has run {steps} steps already, but the recipe asks for {recipe.steps}; raise "
        "training.steps, name another output, or "
        "start anew with --from-scratch."
    )


def shorten_log(log: Path, done: int) -> None:
    """Removes the lines of later steps, which a resumed run writes again.

    Args:
        log: the log; it may be missing.
        done: last step to keep.

    Raises:
        InPlaceTTTError: if the file is not a run's log.
    """
    if not log.is_file():
        return
    kept, lines = [], log.read_bytes().decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)["step"] <= done:
                kept.append(f"{line}\n")
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # the last line may be half of one
                raise InPlaceTTTError(
                    f"{log} is not a log of a run (line {number}); move it away, or choose another output."
                ) from None
    partial = log.with_name(f".{log.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(log)

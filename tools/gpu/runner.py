"""Runs a list of measurements in a given time. It selects, resumes, and writes each row at once."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = Iterable[dict[str, Any]]
SAME = ("device", "driver_cuda", "torch", "triton", "transformers")
"""What must be the same for the rows of one file."""


@dataclass(frozen=True)
class Task:
    """A measurement.

    Attributes:
        file: name of the file that receives its rows, without the ending.
        name: its name, by which it is selected.
        seconds: about how long it takes; 0 if it always runs.
        measure: returns its rows.
        say: returns the line to print for a row, or None.
    """

    file: str
    name: str
    seconds: float
    measure: Callable[[], Rows]
    say: Callable[[dict[str, Any]], str | None] = lambda row: json.dumps(row, ensure_ascii=False)


class Run:
    """A run of tasks into a folder.

    Args:
        folder: receives FILE.json for each file of the tasks.
        about: the device, versions and command, written into each file.
        minutes: the time for all tasks.
        only: words of which a task's file or name must contain one; empty for all tasks.

    Attributes:
        skipped: lines that name each task that did not run, or failed, with the reason.
    """

    def __init__(self, folder: Path, about: dict[str, Any], minutes: float, only: Sequence[str] = ()) -> None:
        self.folder, self.about, self.only = folder, about, [word.lower() for word in only]
        self.end = time.monotonic() + 60 * minutes
        self.skipped: list[str] = []

    def selects(self, task: Task) -> bool:
        return not self.only or any(word in f"{task.file} {task.name}".lower() for word in self.only)

    def is_done(self, task: Task) -> bool:
        return task.name in self._held(task.file)["done"]

    def rows(self, file: str) -> list[dict[str, Any]]:
        """Returns all rows of a file."""
        found: list[dict[str, Any]] = self._held(file)["rows"]
        return found

    def do(self, tasks: Iterable[Task]) -> None:
        """Runs the tasks that are selected and not done, in order, as far as the time suffices.

        A task that raises is named among the skipped ones, and the next one runs. Rows of a task that was cut
        off are measured again.
        """
        for task in tasks:
            if not self.selects(task) or self.is_done(task):
                continue
            left = self.end - time.monotonic()
            if task.seconds > left:
                self.skipped.append(
                    f"{task.name}: needs about {task.seconds:.0f} s, {max(left, 0):.0f} s left"
                )
                continue
            try:
                self._measure(task)
            except Exception as error:
                self.skipped.append(f"{task.name}: {type(error).__name__}: {str(error)[:300]}")
                traceback.print_exc()

    def _measure(self, task: Task) -> None:
        held = self._held(task.file)
        held["rows"] = [row for row in held["rows"] if row["task"] != task.name]
        began = time.monotonic()
        with _watched() as clocks:
            for row in task.measure():
                held["rows"].append({"task": task.name, **row, "clocks": clocks()})
                self._write(task.file, held)
                if (line := task.say(row)) is not None:
                    print(line, flush=True)
        held["done"][task.name] = {"seconds": round(time.monotonic() - began, 1)}
        self._write(task.file, held)

    def _held(self, file: str) -> dict[str, Any]:
        """Returns the rows of a file, and the tasks that are done.

        Raises:
            ValueError: if another device or other versions made them.
        """
        path = self.folder / f"{file}.json"
        if not path.exists():
            return {"done": {}, "rows": []}
        held: dict[str, Any] = json.loads(path.read_text())
        for name in SAME:
            if held.get(name) != self.about.get(name):
                raise ValueError(
                    f"{path} has figures with {name} {held.get(name)}, not {self.about.get(name)}; set OUT to "
                    "another folder."
                )
        return {"done": held["done"], "rows": held["rows"]}

    def _write(self, file: str, held: dict[str, Any]) -> None:
        path = self.folder / f"{file}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(
            json.dumps({**self.about, **held}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        partial.replace(path)


_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


@contextlib.contextmanager
def _watched() -> Iterator[Callable[[], dict[str, float] | None]]:
    """Samples the GPU's clocks (MHz), power (W) and temperature (°C) four times per second.

    Yields a function that returns the medians since its last call; None without samples.
    """
    samples, lock = list[list[float]](), threading.Lock()

    def medians() -> dict[str, float] | None:
        with lock:
            taken, samples[:] = [*samples], []
        columns = zip(*taken, strict=True)
        return dict(zip(_FIELDS, map(statistics.median, columns), strict=True)) if taken else None

    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        process = subprocess.Popen([*command, "-lms", "250"], stdout=subprocess.PIPE, text=True)
    except OSError:  # no GPU
        yield medians
        return

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError), lock:
                samples.append([float(value) for value in line.split(",")])

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield medians
    finally:
        process.terminate()
        process.wait()
        thread.join()

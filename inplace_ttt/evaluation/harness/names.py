"""Names of the tasks that this package makes, and the texts that they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from ...errors import InPlaceTTTError, how_to_install
from ..babilong import tasks as babilong
from ..babilong.filler import Filler
from ..prompt import Task
from ..ruler import tasks as ruler
from ..ruler.material import Material

FAMILIES: dict[str, dict[str, Task]] = {"ruler": {**ruler.TASKS}, "babilong": {**babilong.TASKS}}
TASKS = {**FAMILIES["ruler"], **FAMILIES["babilong"]}


@dataclass(frozen=True)
class Texts:
    """Texts and questions that tasks are made of. They are read when a task first needs them.

    Attributes:
        texts: files, folders or a dataset's name.
        questions: question files of ruler_qa_1 and ruler_qa_2.
        text_field: field of a record that holds its text.
    """

    texts: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    text_field: str | None = None

    @cached_property
    def _material(self) -> Material:
        return Material(self.texts, self.questions, self.text_field)

    @cached_property
    def _filler(self) -> Filler:
        return Filler(self.texts, self.text_field)

    def of(self, task: Task) -> Any:
        """Returns the material of a task.

        Raises:
            InPlaceTTTError: if a text or a question file is missing, or cannot be read.
        """
        if task.in_text and not self.texts:
            raise InPlaceTTTError(
                f"{task.name} hides sentences in a text; give one with --text TEXT, or name other --tasks."
            )
        if not self.has_questions(task):
            files = "a file" if task.questions == 0 else "two files"
            raise InPlaceTTTError(f"{task.name} needs questions; give {files} with --qa, or leave it out.")
        return self._filler if task.name in babilong.TASKS else self._material

    def has_questions(self, task: Task) -> bool:
        """Returns True if the question file of a task is given, or it needs none."""
        return task.questions is None or task.questions < len(self.questions)

    def without_effect(self, tasks: Iterable[Task]) -> list[str]:
        """Returns warnings about texts and questions that none of the tasks uses."""
        tasks, notes = list(tasks), []
        if self.texts and not any(task.in_text or task.name == "ruler_cwe" for task in tasks):
            notes.append("--text does nothing: none of these tasks hides anything in a text.")
        if self.questions and not any(task.questions is not None for task in tasks):
            notes.append("--qa does nothing: none of these tasks asks its questions.")
        return notes


def chosen(names: Sequence[str], texts: Texts) -> tuple[tuple[Task, ...], list[str]]:
    """Returns the tasks of this package among the names, and the other names.

    The name of a family stands for all its tasks whose question files are given.

    Args:
        names: names of tasks and families.
        texts: the given texts and questions.
    """
    tasks: dict[str, Task] = {}
    others: list[str] = []
    for name in dict.fromkeys(names):
        if name in FAMILIES:
            tasks |= {key: task for key, task in FAMILIES[name].items() if texts.has_questions(task)}
        elif name in TASKS:
            tasks[name] = TASKS[name]
        else:
            others.append(name)
    return tuple(tasks.values()), others


def require_lm_eval() -> None:
    """Raises InPlaceTTTError if lm-eval is not installed."""
    if find_spec("lm_eval") is None:
        raise InPlaceTTTError(f"--tasks needs lm-eval, which is not installed; {how_to_install('eval')}.")

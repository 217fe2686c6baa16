"""RULER's thirteen tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..long_context.prompt import Task
from . import qa, tracking, words
from .material import Material
from .niah import Needles
from .scoring import score


@dataclass(frozen=True)
class RulerTask(Task):
    """A task of RULER.

    Attributes:
        any_answer: one of the answers suffices (QA).
        haystack: the task needs the haystack file.
        questions: index of the question file that the task needs, or None.
    """

    any_answer: bool = False
    haystack: bool = False
    questions: int | None = None

    def score(self, prediction: str, answers: Sequence[str], options: Sequence[str]) -> float:
        return score(prediction, answers, self.any_answer)

    def made_of(self, material: Material) -> dict[str, str]:
        digests = {}
        if self.haystack or self.name == "cwe":  # cwe may use words of the haystack
            digests["haystack"] = material.digest
        if self.questions is not None:
            digests["questions"] = material.questions[self.questions].digest
        return digests


_NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}

TASKS = {
    task.name: task
    for task in (
        *(
            RulerTask(name, 128, kind.puzzle, haystack=kind.haystack == "essay")
            for name, kind in _NEEDLES.items()
        ),
        RulerTask("vt", 30, tracking.puzzle),
        RulerTask("cwe", 120, words.common),
        RulerTask("fwe", 50, words.frequent),
        RulerTask("qa_1", 32, partial(qa.puzzle, 0), any_answer=True, questions=0),
        RulerTask("qa_2", 32, partial(qa.puzzle, 1), any_answer=True, questions=1),
    )
}
"""RULER's tasks by name, in its order, with budgets and parameters of its synthetic.yaml."""

"""RULER's thirteen tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..prompt import Task
from . import qa, tracking, words
from .material import Material
from .niah import Needles
from .scoring import score


@dataclass(frozen=True)
class RulerTask(Task):
    """A task of RULER.

    Attributes:
        any_answer: one of the answers suffices (QA).
    """

    any_answer: bool = False

    def score(self, prediction: str, answers: Sequence[str], options: Sequence[str]) -> float:
        return score(prediction, answers, self.any_answer)

    def made_of(self, material: Material) -> dict[str, str]:
        digests = {}
        if self.in_text or self.name == "ruler_cwe":  # cwe may use words of the text
            digests["text"] = material.digest
        if self.questions is not None:
            digests["questions"] = material.questions[self.questions].digest
        return digests


_NEEDLES = {
    "ruler_niah_single_1": Needles("noise"),
    "ruler_niah_single_2": Needles("essay"),
    "ruler_niah_single_3": Needles("essay", value="uuids"),
    "ruler_niah_multikey_1": Needles("essay", keys=4),
    "ruler_niah_multikey_2": Needles("needles"),
    "ruler_niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "ruler_niah_multivalue": Needles("essay", values=4),
    "ruler_niah_multiquery": Needles("essay", keys=4, queries=4),
}

TASKS = {
    task.name: task
    for task in (
        *(
            RulerTask(name, 128, kind.puzzle, in_text=kind.haystack == "essay")
            for name, kind in _NEEDLES.items()
        ),
        RulerTask("ruler_vt", 30, tracking.puzzle),
        RulerTask("ruler_cwe", 120, words.common),
        RulerTask("ruler_fwe", 50, words.frequent),
        RulerTask("ruler_qa_1", 32, partial(qa.puzzle, 0), any_answer=True, questions=0),
        RulerTask("ruler_qa_2", 32, partial(qa.puzzle, 1), any_answer=True, questions=1),
    )
}
"""RULER's tasks by name, in its order, with budgets and parameters of its synthetic.yaml."""

"""RULER's thirteen tasks."""

from __future__ import annotations

from functools import partial

from . import qa, tracking, words
from .niah import Needles
from .prompt import Task

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
        *(Task(name, 128, kind.puzzle, haystack=kind.haystack == "essay") for name, kind in _NEEDLES.items()),
        Task("vt", 30, tracking.puzzle),
        Task("cwe", 120, words.common),
        Task("fwe", 50, words.frequent),
        Task("qa_1", 32, partial(qa.puzzle, 0), any_answer=True, questions=0),
        Task("qa_2", 32, partial(qa.puzzle, 1), any_answer=True, questions=1),
    )
}
"""RULER's tasks by name, in its order: output budgets and parameters as in its synthetic.yaml."""

"""RULER's scores: the expected strings that occur in an answer, in any case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import mean
from typing import Any

from ...reports.statistics import Mean

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(prediction: str, answers: Sequence[str], any_answer: bool) -> float:
    """Returns 0 to 100: the share of `answers` in the prediction or, for QA, 100 if any is in it."""
    text = _CONTROL.sub("\n", prediction).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return 100.0 * (any(found) if any_answer else mean(found))


def mean_of(values: Sequence[float]) -> dict[str, Any]:
    """Returns the mean and its standard error over samples; None for a single sample."""
    return vars(Mean.of(values))


def average(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean over tasks of their means, with equal weights; n is the number of tasks."""
    errors = [row["stderr"] for row in rows]
    known = [error for error in errors if error is not None]
    stderr = sum(error**2 for error in known) ** 0.5 / len(rows) if len(known) == len(rows) else None
    return {"mean": mean(row["mean"] for row in rows), "stderr": stderr, "n": len(rows)}

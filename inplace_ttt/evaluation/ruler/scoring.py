"""RULER's scores: the share of the expected strings that occur in an answer, in any case."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import mean

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(prediction: str, answers: Sequence[str], any_answer: bool) -> float:
    """Returns the share of `answers` in the prediction or, for QA, 1 if any is in it."""
    text = _CONTROL.sub("\n", prediction).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found) if any_answer else mean(found))

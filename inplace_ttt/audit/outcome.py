"""The result of a probe: a verdict and the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["conforms", "deviates", "extension", "unspecified", "not checked"]

VERDICTS: dict[Verdict, str] = {
    "deviates": "measured to differ from the paper",
    "extension": "goes beyond the paper by a setting, and follows that setting",
    "unspecified": "not stated in the paper; the choice made is named",
    "not checked": "could not be measured here, for the reason given",
    "conforms": "measured to agree with the paper",
}

TOLERANCE = 0.01
"""Tolerated error as a fraction of one write. A fault is about as large as a write, rounding far smaller."""


class NotChecked(Exception):
    """Raised by a probe that cannot decide on this module. The message is the reason."""


@dataclass(frozen=True)
class Outcome:
    """A verdict with its numbers.

    Attributes:
        verdict: one of `VERDICTS`.
        found: the observation, as a clause for the report.
        numbers: the measured values by name.
        tolerance: the largest error that passes; 0 for exact equality, None if no tolerance applies.
        chart: data of a chart for the report, with its `kind` (see reports/charts.py), or None.
    """

    verdict: Verdict
    found: str
    numbers: dict[str, Any] = field(default_factory=dict)
    tolerance: float | None = None
    chart: dict[str, Any] | None = None


def judged(
    holds: bool,
    found: str,
    numbers: dict[str, Any],
    tolerance: float | None = None,
    chart: dict[str, Any] | None = None,
) -> Outcome:
    """Returns "conforms" or "deviates", for an item that the paper defines."""
    return Outcome("conforms" if holds else "deviates", found, numbers, tolerance, chart)

"""The result of a probe: a verdict and the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
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


def within(
    errors: Mapping[str, float],
    good: str,
    bad: str | Mapping[str, str],
    tolerance: float = TOLERANCE,
    more: Mapping[str, Any] | None = None,
    chart: dict[str, Any] | None = None,
) -> Outcome:
    """Judges errors by name; the largest one decides.

    Args:
        errors: the errors, which are the numbers of the outcome.
        good: the finding if all are below the tolerance.
        bad: the finding otherwise, or one for each error. It may have the fields `name` and `off`, the name
            and the value of the largest error.
        tolerance: the smallest error that deviates.
        more: further numbers.
        chart: data of a chart.
    """
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    holds, text = errors[worst] < tolerance, bad if isinstance(bad, str) else bad[worst]
    found = good if holds else text.format(name=worst, off=errors[worst])
    return judged(holds, found, {**errors, **(more or {})}, tolerance, chart)

"""What a probe gives back: a verdict and the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["conforms", "deviates", "extension", "unspecified", "not checked"]

VERDICTS: dict[Verdict, str] = {
    "deviates": "measured to differ from what the paper says",
    "extension": "goes beyond the paper by a setting, and does what the setting says",
    "unspecified": "the paper does not say; the choice made is named",
    "not checked": "could not be measured here, for the reason given",
    "conforms": "measured to agree with the paper",
}

TOLERANCE = 0.01
"""Of the size of one write: faults of the rule are of the order of a write, rounding is far below this."""


class NotChecked(Exception):
    """Why a probe cannot decide on this module."""


@dataclass(frozen=True)
class Outcome:
    """A verdict with what was seen, the numbers behind it, and how far off they may be.

    chart: data of a picture for the report, with its `kind` (see reports/charts.py), or nothing.
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
    """The outcome where the paper does say."""
    return Outcome("conforms" if holds else "deviates", found, numbers, tolerance, chart)

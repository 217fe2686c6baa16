"""Computes means with standard errors, and shares with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mean:
    """Mean of n values and its standard error. `vars` returns its JSON keys."""

    mean: float
    stderr: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float], alone: float | None = None) -> Mean:
        """Computes the mean of values.

        Args:
            values: the values.
            alone: standard error to report for a single value.
        """
        values = list(values)
        n = len(values)
        mean = sum(values) / n
        # Values that are not finite give an error that is not finite; statistics.stdev would raise.
        return cls(
            mean, (sum((x - mean) * (x - mean) for x in values) / (n - 1) / n) ** 0.5 if n > 1 else alone, n
        )


def wilson(hits: Sequence[bool]) -> dict[str, Any]:
    """Returns the share of `hits` and its 95 % Wilson interval."""
    n, share, z = len(hits), sum(hits) / len(hits), 1.96
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    half = z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    # Rounding may put an end of the interval outside 0 to 1, or the share outside the interval.
    return {
        "share": share,
        "low": min(share, max(0.0, (middle - half) / scale)),
        "high": max(share, min(1.0, (middle + half) / scale)),
    }

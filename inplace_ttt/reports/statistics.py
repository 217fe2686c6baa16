"""A mean with its standard error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """Mean of n values and its standard error; `vars` of it are its JSON keys."""

    mean: float
    stderr: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float], alone: float | None = None) -> Mean:
        """alone: the standard error of a single value, which has none."""
        values = list(values)
        n = len(values)
        mean = sum(values) / n
        # Not statistics.stdev: values that are not finite give an error that is not finite, and no exception.
        return cls(mean, (sum((x - mean) * (x - mean) for x in values) / (n - 1) / n) ** 0.5 if n > 1 else alone, n)

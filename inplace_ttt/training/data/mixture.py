"""How documents of several sources come together: which source gives the next one, and what each has given in
the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import InPlaceTTTError
from ...texts.sources import Source

if TYPE_CHECKING:
    import numpy as np

_MOST_REPEATED = 100
"""Times that a mixture may be as large as its sources."""


def furthest_behind(tokens: Sequence[int], weights: Sequence[float]) -> int:
    """The source that gave least of its share; the first of equals."""
    return min(range(len(weights)), key=lambda source: tokens[source] / weights[source])


def mixed(
    orders: Sequence[np.ndarray], lengths: np.ndarray, weights: Sequence[float], seed: int | None
) -> np.ndarray:
    """One pass: documents of every source, by number, in an order in which each has its weight's share of the
    tokens at any time.

    orders: the documents of each source, in the order of its first time. lengths: of all documents. A pass
        ends when every source
    was read; what ends sooner starts again, shuffled anew by `seed` unless that is None. Raises
    InPlaceTTTError where a source has no document, or others would be read a hundred times for it.
    """
    import numpy as np

    totals = [int(lengths[order].sum()) for order in orders]
    if not all(totals):
        raise InPlaceTTTError(
            f"entry {totals.index(0) + 1} of data.train has no document to train on, though data.weights "
            "gives it a share; remove both."
        )
    needed = max(total / weight for total, weight in zip(totals, weights, strict=True)) * sum(weights)
    if needed > _MOST_REPEATED * sum(totals):
        raise InPlaceTTTError(
            f"data.weights make {needed:.3g} tokens of the {sum(totals)} there are, until every document "
            "was read once; bring them "
            f"nearer to the sizes of their sources ({', '.join(map(str, totals))} tokens)."
        )
    sizes = lengths.tolist()
    given, times, found = [0] * len(orders), [0] * len(orders), []
    left = [iter(order.tolist()) for order in orders]
    while True:
        source = furthest_behind(given, weights)
        document = next(left[source], None)
        if document is not None:
            given[source] += sizes[document]
            found.append(document)
            continue
        times[source] += 1
        if all(times):
            return np.array(found, dtype=np.int64)
        again = (
            orders[source]
            if seed is None
            else np.random.default_rng([seed, 2, source, times[source]]).permutation(orders[source])
        )
        left[source] = iter(again.tolist())


@dataclass(frozen=True)
class Given:
    """What a source gave: documents, and tokens."""

    documents: int
    tokens: int


def describe(
    sources: Sequence[Source], weights: Sequence[float], given: Sequence[Given]
) -> list[dict[str, Any]]:
    """Plain values for the report: of each source its documents, tokens and share of all tokens; and the
    share that was asked for."""
    total, asked = sum(g.tokens for g in given), sum(weights)
    return [
        {
            "name": source.name,
            "documents": g.documents,
            "tokens": g.tokens,
            "share": g.tokens / total if total else 0.0,
            "weight": weights[number] / asked if weights else None,
        }
        for number, (source, g) in enumerate(zip(sources, given, strict=True))
    ]

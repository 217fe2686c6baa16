"""Mixes the documents of several sources by weight, and reports each source's share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import InPlaceTTTError
from ...texts.sources import Source

if TYPE_CHECKING:
    import numpy as np

_MOST_REPEATED = 100
"""Largest ratio of a mixture's tokens to those of its sources."""


def furthest_behind(tokens: Sequence[int], weights: Sequence[float]) -> int:
    """Returns the index of the source that gave the smallest part of its share, in a tie the first.

    Args:
        tokens: tokens that each source gave so far.
        weights: weight of each source.
    """
    return min(range(len(weights)), key=lambda source: tokens[source] / weights[source])


def mixed(
    orders: Sequence[np.ndarray], lengths: np.ndarray, weights: Sequence[float], seed: int | None
) -> np.ndarray:
    """Returns the documents of one pass, mixed so that each source has its weight's share of the tokens.

    The shares are right at any time, up to one document. A pass ends once every source was read. A source
    that ends sooner starts again.

    Args:
        orders: int64 numbers of each source's documents, in the order of its first pass.
        lengths: int64, tokens of all documents.
        weights: weight of each source.
        seed: shuffles a source anew each time it starts again. None keeps its order.

    Returns:
        Document numbers in order, int64. A number may occur several times.

    Raises:
        InPlaceTTTError: if a source lacks documents, or the mixture has more than a hundred times the
            tokens of its sources.
    """
    import numpy as np

    totals = [int(lengths[order].sum()) for order in orders]
    if not all(totals):
        raise InPlaceTTTError(
            f"entry {totals.index(0) + 1} of data.train lacks a document to train on, though data.weights "
            "gives it a share; remove the entry and its weight."
        )
    needed = max(total / weight for total, weight in zip(totals, weights, strict=True)) * sum(weights)
    if needed > _MOST_REPEATED * sum(totals):
        raise InPlaceTTTError(
            f"with data.weights, one pass over every document has {needed:.3g} tokens, but the sources have "
            f"only {sum(totals)}; choose weights nearer to the sources' sizes "
            f"({', '.join(map(str, totals))} tokens)."
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
    """Counts of the documents and tokens that a source gave."""

    documents: int
    tokens: int


def describe(
    sources: Sequence[Source], weights: Sequence[float], given: Sequence[Given]
) -> list[dict[str, Any]]:
    """Returns plain values for the report, one table per source.

    Args:
        sources: the training sources.
        weights: their weights, or none.
        given: counts of each source.

    Returns:
        Name, documents, tokens, `share` of all tokens, and the share set by `weights` (`weight`, None
        without weights).
    """
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

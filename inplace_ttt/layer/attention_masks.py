"""Which tokens are documents, and which padding, by a mask that says who attends to whom."""

from __future__ import annotations

import itertools

from torch import Tensor

from ..errors import InPlaceTTTError
from ..layout import Span

_MASKED = -1000.0
"""An additive mask below this hides a token; position biases stay above it."""


def seen_tokens(mask: Tensor, past: int, length: int) -> Tensor:
    """Of a mask [b, H, T, K] over what is cached and T new tokens: whether new tokens see new tokens, bool
    [b, T, T].

    K covers `past` tokens and the new ones, or more (a static cache), or fewer (a sliding one, which ends
    with the new ones).
    """
    first = past if mask.shape[-1] >= past + length else mask.shape[-1] - length
    own = mask[:, 0, :, first : first + length]
    return own > _MASKED if own.is_floating_point() else own != 0


def documents_seen(sees: Tensor) -> list[list[Span]]:
    """The documents of each row by who sees whom, bool [b, T, T]; a token is its predecessor's continuation
    if it sees it.

    Tokens that nobody sees are padding; rows of it that see everything, as some masks have it, do not count.
    Tokens may see later ones of their document (images). Raises InPlaceTTTError where tokens see across what
    would be documents.
    """
    everything = sees.all(-1)
    # the last token sees all in a causal mask too
    everything[:, -1] &= everything[:, -2] if sees.shape[1] > 1 else False
    counts = sees & ~(everything & ~everything.all(-1, keepdim=True))[:, :, None]
    real = counts.any(1)
    follows = counts.diagonal(-1, 1, 2) & real[:, 1:] & real[:, :-1]
    starts = real.clone()
    starts[:, 1:] &= ~follows
    document = starts.cumsum(1)
    if bool((counts & (document[:, :, None] != document[:, None, :]) & real[:, :, None]).any()):
        raise InPlaceTTTError(
            "the attention_mask lets tokens see past ones but not their own predecessor, which is no row "
            "of documents; "
            "pass a 2-D mask, or position_ids for packed documents."
        )
    return [_spans(*row) for row in zip(starts.tolist(), real.tolist(), strict=True)]


def _spans(starts: list[bool], real: list[bool]) -> list[Span]:
    spans: list[Span] = []
    for start in itertools.compress(range(len(starts)), starts):
        stop = start + 1
        while stop < len(real) and real[stop] and not starts[stop]:
            stop += 1
        spans.append((start, stop))
    return spans

"""Finds documents and padding in an attention mask of tokens by tokens."""

from __future__ import annotations

import itertools

from torch import Tensor

from ..errors import InPlaceTTTError
from ..layout import Span

_MASKED = -1000.0
"""An additive mask below this value hides a token. Position biases stay above it."""


def seen_tokens(mask: Tensor, past: int, length: int) -> Tensor:
    """Returns the part of an attention mask between the T new tokens.

    Args:
        mask: attention mask [b, H, T, K], bool, integer, or additive in a floating dtype. The K columns are
            the cached tokens, then the T new tokens. With a static cache, further columns follow. With a
            sliding cache there are fewer columns, and the last ones are the new tokens.
        past: number of tokens in the cache.
        length: T.

    Returns:
        A mask [b, T, T], bool: True where the row's token attends to the column's token.
    """
    first = past if mask.shape[-1] >= past + length else mask.shape[-1] - length
    own = mask[:, 0, :, first : first + length]
    return own > _MASKED if own.is_floating_point() else own != 0


def documents_seen(sees: Tensor) -> list[list[Span]]:
    """Returns the documents of each row.

    A token continues the document of the token before it if it attends to that token. A token to which no
    token attends is padding. Some masks let padding attend to every token; such rows of the mask are ignored.
    Tokens may attend to later tokens of their document (images).

    Args:
        sees: a mask [b, T, T] from `seen_tokens`, bool.

    Returns:
        For each row, the spans of its documents.

    Raises:
        InPlaceTTTError: if a token attends to a token of another document.
    """
    everything = sees.all(-1)
    # in a causal mask the last token attends to every token, and may still be no padding
    everything[:, -1] &= everything[:, -2] if sees.shape[1] > 1 else False
    counts = sees & ~(everything & ~everything.all(-1, keepdim=True))[:, :, None]
    real = counts.any(1)
    follows = counts.diagonal(-1, 1, 2) & real[:, 1:] & real[:, :-1]
    starts = real.clone()
    starts[:, 1:] &= ~follows
    document = starts.cumsum(1)
    if bool((counts & (document[:, :, None] != document[:, None, :]) & real[:, :, None]).any()):
        raise InPlaceTTTError(
            "the attention_mask lets tokens see past ones but not their own predecessor, so its rows are not "
            "documents; pass a 2-D mask, or position_ids for packed documents."
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

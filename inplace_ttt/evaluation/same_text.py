"""Refuses documents that hold the same text, shifted or with a few tokens changed.

The state of such a document is not a control for the other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InPlaceTTTError

_WINDOW = 32
"""Length of a run of tokens that two documents share only if they hold the same text."""
_MOST = 1 << 20
"""Upper limit on the number of windows compared, over all documents."""


def refuse_same_text(documents: Sequence[Tensor]) -> None:
    """Checks that no two documents hold the same text.

    Args:
        documents: token ids [T] of each document.

    Raises:
        InPlaceTTTError: if half of a document's windows of 32 tokens occur in another one, at any position.
    """
    size = min(_WINDOW, min(map(len, documents)))
    every = max(1, sum(map(len, documents)) // _MOST)
    first: dict[int, int] = {}
    for number, document in enumerate(documents):
        hashes = _window_hashes(document, size)
        # chosen by their hash, so that shifted texts choose the same windows
        looked_at = hashes[hashes % every == 0].unique().tolist()
        shared = Counter(first[each] for each in looked_at if each in first)
        for other, count in shared.most_common(1):
            if 2 * count > len(looked_at):
                raise InPlaceTTTError(
                    f"documents {other + 1} and {number + 1} hold the same text, so the state of one is "
                    "not a control for the other; give each text once."
                )
        first.update((each, number) for each in looked_at if each not in first)


def _window_hashes(ids: Tensor, size: int) -> Tensor:
    """Returns int64 [T - size + 1], a hash of every `size` successive token ids."""
    ids = ids.cpu().long()
    found = torch.zeros(len(ids) - size + 1, dtype=torch.int64)
    for place in range(size):
        found = found * 6364136223846793005 + ids[place : place + len(found)] + 1442695040888963407
        found ^= found >> 29
    return found

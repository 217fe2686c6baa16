"""Whether two documents are one text, the same or a few tokens apart: then one's state is no control for the
other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InPlaceTTTError

_WINDOW = 32
"""Tokens that two texts have in common only where they are one."""
_MOST = 1 << 20
"""Windows that are looked at, of all documents together."""


def refuse_same_text(documents: Sequence[Tensor]) -> None:
    """Raises InPlaceTTTError where half of a document's windows of 32 tokens stand in another one too, at
    whatever place."""
    size = min(_WINDOW, min(map(len, documents)))
    every = max(1, sum(map(len, documents)) // _MOST)
    first: dict[int, int] = {}
    for number, document in enumerate(documents):
        hashes = _window_hashes(document, size)
        # chosen by what they hold, so that texts that are moved agree
        looked_at = hashes[hashes % every == 0].unique().tolist()
        shared = Counter(first[each] for each in looked_at if each in first)
        for other, count in shared.most_common(1):
            if 2 * count > len(looked_at):
                raise InPlaceTTTError(
                    f"documents {other + 1} and {number + 1} hold the same text, so that one's state is no "
                    "control for the other; "
                    "give each text once."
                )
        first.update((each, number) for each in looked_at if each not in first)


def _window_hashes(ids: Tensor, size: int) -> Tensor:
    """int64 [T - size + 1], a number for every `size` token ids in a row."""
    ids = ids.cpu().long()
    found = torch.zeros(len(ids) - size + 1, dtype=torch.int64)
    for place in range(size):
        found = found * 6364136223846793005 + ids[place : place + len(found)] + 1442695040888963407
        found ^= found >> 29
    return found

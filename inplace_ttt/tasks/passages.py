"""A passage that occurs twice in a document, the second time beyond the attention window."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Passage:
    """A passage and its second copy.

    Attributes:
        length: number of tokens of the passage.
        gap: number of tokens between the end of the passage and its second copy.
    """

    length: int = 512
    gap: int = 1024

    @property
    def tokens(self) -> int:
        """Length of the shortest document that has room for both copies."""
        return 2 * self.length + self.gap

    def random_start(self, tokens: int, generator: random.Random, least: int = 0) -> int:
        """Returns a random start of the passage in a document of `tokens`, at `least` or later."""
        return generator.randint(least, tokens - self.tokens)

    def between(self, start: int) -> slice:
        """Returns the slice of the unrelated tokens between both copies."""
        return slice(start + self.length, start + self.length + self.gap)

    def second(self, start: int) -> slice:
        """Returns the slice of the second copy."""
        return slice(start + self.length + self.gap, start + self.tokens)

    def repeat(self, ids: Tensor, start: int) -> Tensor:
        """Returns a copy of token ids [T] in which the passage at `start` is repeated."""
        ids = ids.clone()
        ids[self.second(start)] = ids[start : start + self.length]
        return ids


def mean_loss(losses: Tensor, span: slice) -> Tensor:
    """Returns the mean loss [...] of a span's tokens except the first, which is predicted from outside.

    Args:
        losses: losses [..., T - 1] of the tokens 1 to T - 1.
        span: positions of the tokens.
    """
    return losses[..., span.start : span.stop - 1].mean(-1)

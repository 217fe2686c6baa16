"""A passage that stands twice in a document, the second time beyond the attention window."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Passage:
    """length tokens that stand again `gap` tokens after their end."""

    length: int = 512
    gap: int = 1024

    @property
    def tokens(self) -> int:
        """The shortest document that has room for it."""
        return 2 * self.length + self.gap

    def random_start(self, tokens: int, generator: random.Random, least: int = 0) -> int:
        """Where the passage starts in a document of `tokens`, at `least` or later."""
        return generator.randint(least, tokens - self.tokens)

    def between(self, start: int) -> slice:
        """The unrelated tokens between both copies."""
        return slice(start + self.length, start + self.length + self.gap)

    def second(self, start: int) -> slice:
        """The second copy of the passage at `start`."""
        return slice(start + self.length + self.gap, start + self.tokens)

    def repeat(self, ids: Tensor, start: int) -> Tensor:
        """A copy of token ids [T] in which the passage at `start` stands again."""
        ids = ids.clone()
        ids[self.second(start)] = ids[start : start + self.length]
        return ids

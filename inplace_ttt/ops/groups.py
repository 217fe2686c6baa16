"""Groups of chunks whose products and factorizations are computed in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..layout import Span

_SUMS_BYTES = 1 << 29
"""Bytes of a GPU's memory for the sums of the chunks of one batch.

Their gradients, factors and parts need four times as much in addition.
"""


def chunks_together(device: torch.device, state_bytes: int) -> int:
    """Returns the number of chunks whose products and factorizations are computed in one batch.

    It is one on a CPU, since a single chunk keeps a CPU busy. On a GPU it is the number of states of
    `state_bytes` bytes that fit into the memory limit.
    """
    return 1 if device.type == "cpu" else max(_SUMS_BYTES // state_bytes, 1)


@dataclass(frozen=True)
class Group:
    """Consecutive parts of a document, of equal length.

    Attributes:
        start: first token.
        stop: end of its tokens.
        parts: number of parts; 1 if the group ends with an incomplete chunk.
        written: end of the tokens of its complete chunks.
    """

    start: int
    stop: int
    parts: int
    written: int

    @property
    def here(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def is_complete(self) -> bool:
        """True if the group holds a complete chunk."""
        return self.written > self.start


def groups(document: Span, size: int, chunk_size: int, together: int) -> Iterator[Group]:
    """Yields a document's groups in order.

    The first part forms its own group, because it may have nothing to read. So do the tokens that are left
    after the last part.

    Args:
        document: its first token and its end.
        size: tokens of a part, a multiple of the chunk size.
        chunk_size: tokens per chunk.
        together: most parts of a group.
    """
    start, stop = document
    most = 1
    while stop - start >= size:
        n = min(most, (stop - start) // size)
        yield Group(start, start + n * size, n, start + n * size)
        start, most = start + n * size, together
    if start < stop:
        yield Group(start, stop, 1, stop - (stop - start) % chunk_size)

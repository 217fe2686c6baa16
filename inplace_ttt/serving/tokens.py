"""The requests of a step, sorted once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..layer.buffers import SingleTokens
from .snapshots import Snapshot


@dataclass(frozen=True)
class Tokens:
    """One request's tokens in the batch, and its slot.

    Attributes:
        slot: the request's slot.
        seen: the number of tokens that the slot's state has read before this step.
        start: index of the request's first token in the batch.
        stop: index after its last token.
        restores: the snapshot to load into the slot first, or None.
    """

    slot: int
    seen: int
    start: int
    stop: int
    restores: Snapshot | None = None


@dataclass(frozen=True)
class StepTokens:
    """The requests of a step.

    Attributes:
        longer: requests with several tokens.
        reading: the single tokens of requests that have written a chunk; None if there are none.
        open: the single tokens that leave their chunk incomplete; None if there are none.
        completing: requests whose single token completes a chunk.
    """

    longer: tuple[Tokens, ...]
    reading: SingleTokens | None
    open: SingleTokens | None
    completing: tuple[Tokens, ...]

    @classmethod
    def of(cls, requests: Sequence[Tokens], chunk_size: int, device: torch.device) -> StepTokens:
        """Sorts the requests. Their index tensors are copied to the device in one piece."""
        single, longer = list[tuple[bool, bool, Tokens]](), list[Tokens]()
        for request in requests:
            if request.stop - request.start > 1:
                longer.append(request)
            else:
                written, filled = divmod(request.seen, chunk_size)
                single.append((filled + 1 == chunk_size, written > 0, request))
        # in this order, open tokens and reading tokens are each one piece
        single.sort(key=lambda one: (one[0], one[0] != one[1]))
        completes = [complete for complete, _, _ in single]
        reads = [index for index, (_, is_read, _) in enumerate(single) if is_read]
        every = (
            SingleTokens.of([(one.start, one.slot, one.seen % chunk_size) for _, _, one in single], device)
            if single
            else None
        )
        still_open = completes.count(False)
        return cls(
            tuple(longer),
            None if every is None or not reads else every[reads[0] : reads[-1] + 1],
            None if every is None or not still_open else every[:still_open],
            tuple(one for complete, _, one in single if complete),
        )

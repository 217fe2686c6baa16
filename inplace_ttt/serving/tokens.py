"""The tokens of a step, sorted once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device_copies import on_device


@dataclass(frozen=True)
class Tokens:
    """One request's tokens in the batch, and its slot.

    Attributes:
        slot: the request's slot.
        seen: the number of tokens that the slot's state has read before this step.
        start: index of the request's first token in the batch.
        stop: index after its last token.
    """

    slot: int
    seen: int
    start: int
    stop: int


class SingleTokens:
    """The tokens of requests with one token in a step.

    They are at the same address in all steps, so a CUDA graph that was recorded in one step reads those of
    the step that replays it. Entries past the step's tokens stand for padding: they read and write slot 0,
    which no request has. Its state is always zero.

    Args:
        most: the largest number of requests in a step.
        device: the device of the slots.

    Attributes:
        index: for each token [4, most] int64: its index in the batch, the slot that it reads, the slot that
            it is stored in, and its position in this slot's open chunk.
        count: the number of tokens in this step.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._padding = torch.zeros(4, most, dtype=torch.int64)
        self._padding[0] = torch.arange(most)
        self.index, self.count = self._padding.to(device, copy=True), 0

    def put(self, tokens: Sequence[tuple[int, int, int, int]]) -> None:
        """Sets the tokens of this step, in one copy to the device."""
        self.count = len(tokens)
        host = self._padding.clone()
        if tokens:
            host[:, : self.count] = torch.tensor([*zip(*tokens, strict=True)])
        self.index.copy_(on_device(host, self.index.device))


@dataclass(frozen=True)
class StepTokens:
    """The requests of a step.

    Attributes:
        single: the tokens of requests with one token.
        longer: requests with several tokens, without those that have fast weights off.
        alone: True if no request of the batch has several tokens. A CUDA graph can record such a step.
    """

    single: SingleTokens
    longer: tuple[Tokens, ...] = ()
    alone: bool = True

    def index(self, total: int) -> Tensor:
        """Returns the index of the single tokens among `total` tokens of the batch, [4, n].

        In a step of single tokens alone, all tokens past them are padding.
        """
        return self.single.index[:, : total if self.alone else self.single.count]

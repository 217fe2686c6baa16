"""A sequence that a probe reads in pieces."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stream(Protocol):
    """A sequence that is read in pieces.

    Optional members:

    - `state`: the tensor that the stream carries from piece to piece.
    - `tensors()`: the stream's tensors by name, if they are not the module's own.
    """

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        """Returns outputs [1, n, d] of the next n tokens; inputs x [1, n, input], target source [1, n, d]."""

    def reset(self) -> None:
        """Clears the stream. Another sequence can then begin."""

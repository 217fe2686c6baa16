"""Measures on a text how much of a session's gain its export keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..families import locate
from .token_losses import Progress, token_losses

PIECE = 512
"""Tokens per row. Rows do not see each other, so attention does not hide the part of the weights."""
MOST = 8 * PIECE
"""Most tokens of a text that are read."""

Read = Callable[[Tensor], Tensor]
"""Maps a down-projection's inputs [..., h] to an addition to its outputs [..., d]."""


@dataclass(frozen=True)
class Kept:
    """Mean losses of a text in nats per token.

    Attributes:
        tokens: scored tokens.
        without: loss of the model without TTT.
        session: loss with the session's fast weights, which do not change while the text is read.
        exported: loss of the export.
    """

    tokens: int
    without: float
    session: float
    exported: float

    @property
    def share(self) -> float | None:
        """The part of the session's gain that the export keeps; None if the session gains nothing."""
        gain = self.without - self.session
        return (self.without - self.exported) / gain if gain > 0 else None


def rows_of(ids: Tensor) -> Tensor:
    """Returns the first `MOST` of a text's token ids [n] as rows [B, T], without an incomplete last row."""
    size = min(len(ids), PIECE)
    number = min(len(ids), MOST) // size
    return ids[: number * size].view(number, size)


def mean_loss(
    plain: PreTrainedModel, rows: Tensor, reads: Mapping[int, Read], progress: Progress = lambda tokens: None
) -> float:
    """Returns the mean loss of rows [B, T], in nats per token.

    Args:
        plain: a model without TTT.
        rows: token ids.
        reads: layer -> the addition to the outputs of its down-projection.
        progress: called with the number of tokens after each row.
    """
    with _adding(plain, reads):
        losses = [token_losses(plain, row[None], piece=len(row), progress=progress).mean() for row in rows]
    return float(sum(losses)) / len(losses)


@contextmanager
def _adding(plain: PreTrainedModel, reads: Mapping[int, Read]) -> Iterator[None]:
    layers = locate(plain).layers if reads else {}

    def hook(read: Read) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        return lambda module, args, out: out + read(args[0])

    handles = [layers[index].down_proj.register_forward_hook(hook(read)) for index, read in reads.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

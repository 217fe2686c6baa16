"""Measures predictions with all writes, with one layer's writes off, and without writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import ChunkLayout
from ..surgery import disable_ttt
from ..tasks import IGNORED
from .diagnosed_model import DiagnosedModel
from .overrides import with_eta
from .targets import points_away

HARM = 0.01
"""Largest rise of the loss by writes that does not count as harm, in nats per token."""
_SLICE = 256
"""Number of tokens whose logits are held in float32 at a time."""
_ROUNDING = 64.0
"""Largest rounding error of logits, in steps of their dtype at the size of the logits."""
_STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.5, 8: 2.4}
"""Half-width of the 95 % interval in standard errors, by the number of chunks; 2 from nine chunks on."""


@dataclass(frozen=True)
class Change:
    """Change of the mean loss, in nats per token, over the tokens that can read a write.

    Attributes:
        loss: the change.
        stderr: standard error over chunks, each weighted by its number of tokens; None for a single chunk.
        chunks: number of chunks.
    """

    loss: float
    stderr: float | None
    chunks: int = 0

    @property
    def error(self) -> float:
        """Half-width of the 95 % interval around `loss`; infinite for a single chunk."""
        return math.inf if self.stderr is None else _STUDENT.get(self.chunks, 2.0) * self.stderr

    def exceeds(self, nats: float) -> bool:
        """Returns True if the change is above `nats` and above its own error."""
        return self.loss > max(nats, self.error)

    def __neg__(self) -> Change:
        return Change(-self.loss, self.stderr, self.chunks)

    def __str__(self) -> str:
        return (
            f"{self.loss:+.3g}" + ("" if self.stderr is None else f" ± {self.error:.1g}") + " nats per token"
        )


@dataclass(frozen=True)
class Few:
    """Concentration of a change of the loss in a few tokens.

    Attributes:
        share: loss added at the most harmed hundredth of the tokens, minus the gain of the most helped
            hundredth, as a fraction of the total change.
        count: number of tokens in a hundredth.
        token: id that the most harmed tokens read most often.
        times: number of the most harmed tokens that read this id.
        text: text of the token, if there is a tokenizer.
    """

    share: float
    count: int
    token: int
    times: int
    text: str | None = None


@dataclass(frozen=True)
class Effect:
    """Effect of one layer's writes.

    Attributes:
        loss: loss with the writes minus loss without.
        logits: RMS change of the logits, after each token's mean change is subtracted.
        few: concentration of the change of the loss in few tokens.
        leaked: RMS change of the logits of documents' first chunks, which read no write; 0 if rounding
            explains it.
        turned: change of the loss by writes of the opposite sign; measured only for a layer whose targets
            point away from their source.
    """

    loss: Change
    logits: float
    few: Few
    leaked: float = 0.0
    turned: Change | None = None


@dataclass(frozen=True)
class Reading:
    """Losses of a forward pass.

    Attributes:
        losses: float32 [B, T] in nats; zero if nothing is predicted.
        logits: [B, T, V], or None if they were not kept.
    """

    losses: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """Tokens over which readings are compared.

    Attributes:
        mask: bool [B, T], tokens that can read a write and predict a label.
        chunk: int64 [B, T], the chunk of each token, numbered over all rows.
        first: bool [B, T], tokens of the documents' first chunks, which read no write.
    """

    mask: Tensor
    chunk: Tensor
    first: Tensor

    @classmethod
    def of(cls, model: DiagnosedModel, layout: ChunkLayout) -> Scored:
        """Selects the tokens by the layout of the rows and the labels."""
        labels = model.next_tokens
        mask, first = (torch.zeros_like(labels, dtype=torch.bool) for _ in range(2))
        for row, spans in enumerate(layout.documents):
            for start, stop in spans:
                # the label after the last token is the next document's first token
                mask[row, start + layout.chunk_size : stop - 1] = True
                first[row, start : min(start + layout.chunk_size, stop)] = True
        ids = layout.chunk_ids(labels.device).long()
        rows = torch.arange(len(ids), device=labels.device)[:, None] * (int(ids.max()) + 1)
        return cls(mask & (labels != IGNORED), ids + rows, first)

    def change(self, on: Reading, off: Reading) -> Change:
        """Returns the mean of on - off over tokens, with its standard error over chunks.

        A chunk with few tokens has little weight.
        """
        difference, chunk = (on.losses - off.losses)[self.mask].double(), self.chunk[self.mask]
        numbers, place = chunk.unique(return_inverse=True)
        mean, n = difference.mean(), len(numbers)
        parts = torch.zeros(n, dtype=torch.float64, device=place.device).index_add_(
            0, place, difference - mean
        )
        stderr = float(parts.square().sum().mul(n / (n - 1)).sqrt() / len(difference)) if n > 1 else None
        return Change(float(mean), stderr, n)

    def few(self, on: Reading, off: Reading, model: DiagnosedModel) -> Few:
        """Measures the concentration of the change on - off in a few tokens."""
        difference, read = (on.losses - off.losses)[self.mask].double(), model.inputs["input_ids"][self.mask]
        count, ordered = -(-len(difference) // 100), difference.argsort()
        helped, harmed = ordered[:count], ordered[-count:]
        whole = float(difference.sum())
        share = float(difference[harmed].sum() + difference[helped].sum()) / whole if whole else 0.0
        token, times = Counter(read[harmed].tolist()).most_common(1)[0]
        return Few(
            share, count, token, times, None if model.tokenizer is None else model.tokenizer.decode([token])
        )

    def logit_change(self, on: Reading, off: Reading) -> float:
        """Returns the RMS change of the logits of the tokens that can read a write."""
        return _rms_change(on, off, self.mask)

    def leaked(self, on: Reading, off: Reading) -> float:
        """Returns the RMS change of the logits of tokens that read no write; 0 if within rounding."""
        assert on.logits is not None
        found = _rms_change(on, off, self.first)
        size = float(on.logits[self.first].float().square().mean().sqrt())
        return found if found > _ROUNDING * torch.finfo(on.logits.dtype).eps * size else 0.0


def _rms_change(on: Reading, off: Reading, mask: Tensor) -> float:
    assert on.logits is not None and off.logits is not None
    total = 0.0
    for first in range(0, mask.shape[1], _SLICE):
        here = slice(first, first + _SLICE)
        moved = (on.logits[:, here] - off.logits[:, here])[mask[:, here]].float()
        total += float((moved - moved.mean(-1, keepdim=True)).square().mean(-1).sum())
    return (total / int(mask.sum())) ** 0.5


@torch.no_grad()
def read(
    model: DiagnosedModel, within: AbstractContextManager[Any] | None = None, *, keep_logits: bool = False
) -> Reading:
    """Runs a forward pass in eval mode.

    Args:
        model: the model and its rows.
        within: a context to run in.
        keep_logits: return the logits too.
    """
    with model.mode(training=False), within or nullcontext():
        logits = model.forward().logits
    labels, losses = model.next_tokens, torch.zeros(logits.shape[:2], device=logits.device)
    for first in range(0, logits.shape[1], _SLICE):
        here = slice(first, first + _SLICE)
        flat = torch.nn.functional.cross_entropy(
            logits[:, here].flatten(0, 1).float(), labels[:, here].flatten(), reduction="none"
        )
        losses[:, here] = flat.view(len(losses), -1)
    return Reading(losses, logits if keep_logits else None)


def read_off(model: DiagnosedModel, within: AbstractContextManager[Any] | None = None) -> Reading:
    """Runs a forward pass in eval mode with every layer's writes off."""
    with disable_ttt(model.module):
        return read(model, within)


def effects(
    model: DiagnosedModel, scored: Scored, on: Reading, tick: Callable[[str], None]
) -> dict[int, Effect]:
    """Measures each layer's effect, by turning off the writes of this layer alone.

    Args:
        model: the model and its rows.
        scored: the tokens to compare.
        on: the reading with all writes, with its logits.
        tick: called with a title before each forward pass.

    Returns:
        The effect by layer index.
    """
    found = {}
    for index in model.layers:
        tick(f"layer {index} off")
        off = read(model, with_eta(model.layers, {index: 0.0}), keep_logits=True)
        change, turned = scored.change(on, off), None
        if points_away(model.layers[index]):
            tick(f"layer {index} with the opposite sign")
            turned = scored.change(
                read(model, with_eta(model.layers, {index: -model.layers[index].eta})), off
            )
        moved, leaked = scored.logit_change(on, off), scored.leaked(on, off)
        found[index] = Effect(change, moved, scored.few(on, off, model), leaked, turned)
    return found

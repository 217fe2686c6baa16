"""The effect of writes on the model's predictions: with all of them, with one layer's off, with none."""

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
"""Nats per token above the loss with the writes off that still count as none."""
_SLICE = 256
"""Tokens whose logits are held in full precision at a time."""
_ROUNDING = 64.0
"""Steps of a dtype, of the size of the logits, that rounding may move them by."""
_STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6, 7: 2.5, 8: 2.4}
"""Standard errors in half of an interval of 95 %, by the number of chunks; two from nine on."""


@dataclass(frozen=True)
class Change:
    """Of the mean loss (nats per token) over the tokens that can read a write. stderr: over chunks, each by
    its number of tokens; None for a single one. chunks: how many."""

    loss: float
    stderr: float | None
    chunks: int = 0

    @property
    def error(self) -> float:
        """Half of the interval of 95 % around `loss`; without end for a single chunk."""
        return math.inf if self.stderr is None else _STUDENT.get(self.chunks, 2.0) * self.stderr

    def exceeds(self, nats: float) -> bool:
        """Above it, and above its own error."""
        return self.loss > max(nats, self.error)

    def __neg__(self) -> Change:
        return Change(-self.loss, self.stderr, self.chunks)

    def __str__(self) -> str:
        return (
            f"{self.loss:+.3g}" + ("" if self.stderr is None else f" ± {self.error:.1g}") + " nats per token"
        )


@dataclass(frozen=True)
class Few:
    """How much of a change of the loss is of the hundredth of the tokens harmed most, less what the hundredth
    helped most gains.

    share: of the whole change. count: a hundredth of the tokens. token: the id that those harmed most read
        most often; times: how often;
    text: the token's, where a tokenizer says it.
    """

    share: float
    count: int
    token: int
    times: int
    text: str | None = None


@dataclass(frozen=True)
class Effect:
    """One layer's writes: loss with them minus loss without; RMS of the change of the logits, each token's
    mean taken off.

    leaked: the same RMS over documents' first chunks, which read no write; 0 where rounding explains it.
        turned: the change of the loss
    by writes of the other sign, for a layer whose targets point away from their source.
    """

    loss: Change
    logits: float
    few: Few
    leaked: float = 0.0
    turned: Change | None = None


@dataclass(frozen=True)
class Reading:
    """Losses [B, T] in nats, float32, zero where nothing is predicted; logits [B, T, V] if they were kept."""

    losses: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """The tokens that can read a write, those that cannot, and the chunk that each is in: [B, T] booleans and
    numbers."""

    mask: Tensor
    chunk: Tensor
    first: Tensor

    @classmethod
    def of(cls, model: DiagnosedModel, layout: ChunkLayout) -> Scored:
        labels = model.next_tokens
        mask, first = (torch.zeros_like(labels, dtype=torch.bool) for _ in range(2))
        for row, spans in enumerate(layout.documents):
            for start, stop in spans:
                # the last token predicts another document's first
                mask[row, start + layout.chunk_size : stop - 1] = True
                first[row, start : min(start + layout.chunk_size, stop)] = True
        ids = layout.chunk_ids(labels.device).long()
        rows = torch.arange(len(ids), device=labels.device)[:, None] * (int(ids.max()) + 1)
        return cls(mask & (labels != IGNORED), ids + rows, first)

    def change(self, on: Reading, off: Reading) -> Change:
        """Mean of on − off over tokens, its error from the chunks' parts in it: a chunk of few tokens has
        little."""
        difference, chunk = (on.losses - off.losses)[self.mask].double(), self.chunk[self.mask]
        numbers, place = chunk.unique(return_inverse=True)
        mean, n = difference.mean(), len(numbers)
        parts = torch.zeros(n, dtype=torch.float64, device=place.device).index_add_(
            0, place, difference - mean
        )
        stderr = float(parts.square().sum().mul(n / (n - 1)).sqrt() / len(difference)) if n > 1 else None
        return Change(float(mean), stderr, n)

    def few(self, on: Reading, off: Reading, model: DiagnosedModel) -> Few:
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
        return _rms_change(on, off, self.mask)

    def leaked(self, on: Reading, off: Reading) -> float:
        """RMS change of the logits of tokens that read no write; 0 where it is no more than rounding."""
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
    """A forward in eval mode."""
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
    """The same weights with every layer's writes off."""
    with disable_ttt(model.module):
        return read(model, within)


def effects(
    model: DiagnosedModel, scored: Scored, on: Reading, tick: Callable[[str], None]
) -> dict[int, Effect]:
    """Each layer's, by turning its writes off alone; `on` with its logits."""
    found = {}
    for index in model.layers:
        tick(f"layer {index} off")
        off = read(model, with_eta(model.layers, {index: 0.0}), keep_logits=True)
        change, turned = scored.change(on, off), None
        if points_away(model.layers[index]):
            tick(f"layer {index} with the other sign")
            turned = scored.change(
                read(model, with_eta(model.layers, {index: -model.layers[index].eta})), off
            )
        moved, leaked = scored.logit_change(on, off), scored.leaked(on, off)
        found[index] = Effect(change, moved, scored.few(on, off, model), leaked, turned)
    return found

"""The effect of writes on the model's predictions: with all of them, with one layer's off, with none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import ChunkLayout
from ..surgery import ttt_disabled
from ..tasks import IGNORED
from .diagnosed_model import DiagnosedModel
from .overrides import with_eta

_SLICE = 256
"""Tokens whose logits are held in full precision at a time."""


@dataclass(frozen=True)
class Change:
    """Of the mean loss (nats a token) over the tokens that can read a write. stderr: over chunks, each by its number of tokens; None for
    a single one."""

    loss: float
    stderr: float | None

    def exceeds(self, nats: float) -> bool:
        """Above it, and above twice its own error."""
        return self.loss > max(nats, 2 * (self.stderr or 0.0))


@dataclass(frozen=True)
class Few:
    """How much of a change of the loss is of the hundredth of the tokens harmed most, less what the hundredth helped most gains.

    share: of the whole change. count: a hundredth of the tokens. token: the id that those harmed most read most often; times: how often;
    text: the token's, where a tokenizer says it.
    """

    share: float
    count: int
    token: int
    times: int
    text: str | None = None


@dataclass(frozen=True)
class Effect:
    """One layer's writes: loss with them minus loss without; RMS of the change of the logits, each token's mean taken off."""

    loss: Change
    logits: float
    few: Few


@dataclass(frozen=True)
class Reading:
    """Losses [B, T] in nats, float32, zero where nothing is predicted; logits [B, T, V] if they were kept."""

    losses: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """The tokens that can read a write, and the chunk that each is in: [B, T] booleans and numbers."""

    mask: Tensor
    chunk: Tensor

    @classmethod
    def of(cls, model: DiagnosedModel, layout: ChunkLayout) -> Scored:
        labels = model.next_tokens
        mask = torch.zeros_like(labels, dtype=torch.bool)
        for row, spans in enumerate(layout.documents):
            for start, stop in spans:
                mask[row, start + layout.chunk_size : stop - 1] = True  # the last token predicts another document's first
        ids = layout.chunk_ids(labels.device).long()
        rows = torch.arange(len(ids), device=labels.device)[:, None] * (int(ids.max()) + 1)
        return cls(mask & (labels != IGNORED), ids + rows)

    def change(self, on: Reading, off: Reading) -> Change:
        """Mean of on − off over tokens, its error from the chunks' parts in it: a chunk of few tokens has little."""
        difference, chunk = (on.losses - off.losses)[self.mask].double(), self.chunk[self.mask]
        numbers, place = chunk.unique(return_inverse=True)
        mean, n = difference.mean(), len(numbers)
        parts = torch.zeros(n, dtype=torch.float64, device=place.device).index_add_(0, place, difference - mean)
        stderr = float(parts.square().sum().mul(n / (n - 1)).sqrt() / len(difference)) if n > 1 else None
        return Change(float(mean), stderr)

    def few(self, on: Reading, off: Reading, model: DiagnosedModel) -> Few:
        difference, read = (on.losses - off.losses)[self.mask].double(), model.inputs["input_ids"][self.mask]
        count, ordered = -(-len(difference) // 100), difference.argsort()
        helped, harmed = ordered[:count], ordered[-count:]
        whole = float(difference.sum())
        share = float(difference[harmed].sum() + difference[helped].sum()) / whole if whole else 0.0
        token, times = Counter(read[harmed].tolist()).most_common(1)[0]
        return Few(share, count, token, times, None if model.tokenizer is None else model.tokenizer.decode([token]))

    def logit_change(self, on: Reading, off: Reading) -> float:
        assert on.logits is not None and off.logits is not None
        total = 0.0
        for first in range(0, self.mask.shape[1], _SLICE):
            here = slice(first, first + _SLICE)
            moved = (on.logits[:, here] - off.logits[:, here])[self.mask[:, here]].float()
            total += float((moved - moved.mean(-1, keepdim=True)).square().mean(-1).sum())
        return (total / int(self.mask.sum())) ** 0.5


@torch.no_grad()
def read(model: DiagnosedModel, within: AbstractContextManager[Any] | None = None, *, keep_logits: bool = False) -> Reading:
    """A forward in eval mode."""
    with model.mode(training=False), within or nullcontext():
        logits = model.forward().logits
    labels, losses = model.next_tokens, torch.zeros(logits.shape[:2], device=logits.device)
    for first in range(0, logits.shape[1], _SLICE):
        here = slice(first, first + _SLICE)
        flat = torch.nn.functional.cross_entropy(logits[:, here].flatten(0, 1).float(), labels[:, here].flatten(), reduction="none")
        losses[:, here] = flat.view(len(losses), -1)
    return Reading(losses, logits if keep_logits else None)


def read_off(model: DiagnosedModel, within: AbstractContextManager[Any] | None = None) -> Reading:
    """The same weights with every layer's writes off."""
    with ttt_disabled(model.module):
        return read(model, within)


def effects(model: DiagnosedModel, scored: Scored, on: Reading, tick: Callable[[str], None]) -> dict[int, Effect]:
    """Each layer's, by turning its writes off alone; `on` with its logits."""
    found = {}
    for index in model.layers:
        tick(f"layer {index} off")
        off = read(model, with_eta(model.layers, {index: 0.0}), keep_logits=True)
        found[index] = Effect(scored.change(on, off), scored.logit_change(on, off), scored.few(on, off, model))
    return found

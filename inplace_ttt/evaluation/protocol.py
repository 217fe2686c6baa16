"""Settings for reading documents, and the losses with and without writes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..attention_window import SINKS
from ..surgery import config_of
from .baseline_losses import BaselineLosses
from .token_losses import Progress, token_losses


@dataclass(frozen=True)
class Protocol:
    """Sets how `compare` and the other evaluations read documents.

    Args:
        window: attention window in tokens; None for full attention.
        sinks: first tokens that stay visible in addition to the window.
        skip: first tokens of a document that do not count.
        batch_size: documents per batch.
        begins: special tokens that begin every text of this model, such as a BOS. A probe puts them first if
            it cuts a text or drops the KV cache.

    Examples:
        >>> from inplace_ttt.evaluation.protocol import Protocol
        >>> Protocol(window=256, skip=64).attention
        {'window': 256, 'sinks': 4}
    """

    window: int | None = None
    sinks: int = SINKS
    skip: int = 0
    batch_size: int = 4
    begins: tuple[int, ...] = ()

    @property
    def attention(self) -> dict[str, int | None]:
        """The arguments `window` and `sinks`."""
        return {"window": self.window, "sinks": self.sinks}


def on_and_off_losses(
    model: PreTrainedModel,
    rows: Tensor,
    protocol: Protocol,
    baseline: BaselineLosses | None,
    base: PreTrainedModel | None = None,
    *,
    progress: Progress,
) -> dict[str, Tensor]:
    """Reads rows with TTT on, with TTT off, and with a base.

    Args:
        model: a converted model.
        rows: token ids [B, T].
        protocol: settings of the reading.
        baseline: keeps losses without writes, or None.
        base: the model to compare with, or None.
        progress: called with the number of tokens after each piece.

    Returns:
        Token losses "on", "off" and, with a base, "base": float32 [B, T - 1] in nats.
    """
    baseline, chunk = baseline or BaselineLosses(), config_of(model).chunk_size
    how: dict[str, Any] = {**protocol.attention, "progress": progress}
    groups = rows.split(protocol.batch_size)
    found = {
        "on": [token_losses(model, group, piece=chunk, **how) for group in groups],
        "off": [baseline.of(model, group, piece=chunk, **how) for group in groups],
        "base": [] if base is None else [baseline.of(base, group, piece=chunk, **how) for group in groups],
    }
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def progress_bar(title: str, total: int, shown: bool, unit: str = "tok") -> tqdm[Any]:
    """Returns a progress bar on stderr."""
    return tqdm(total=total, desc=title, unit=unit, file=sys.stderr, disable=None if shown else True)

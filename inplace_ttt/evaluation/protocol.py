"""How documents are read: the attention, the batches, and the losses with and without writes."""

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
    """How documents are read.

    window, sinks: attention, all of the text without a window. skip: first tokens that do not count.
    batch_size: documents at once. begins: special tokens that begin every text of this model, a BOS; a probe
        that cuts a text, or forgets
    what was attended to, puts them first.
    """

    window: int | None = None
    sinks: int = SINKS
    skip: int = 0
    batch_size: int = 4
    begins: tuple[int, ...] = ()

    @property
    def attention(self) -> dict[str, int | None]:
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
    """Token losses float32 [B, T - 1] of token ids [B, T]: on, off, and base where there is one."""
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
    return tqdm(total=total, desc=title, unit=unit, file=sys.stderr, disable=None if shown else True)

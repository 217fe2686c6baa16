"""Logits a few hundred tokens at a time: at long rows and large vocabularies all of them at once outweigh everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .families import locate
from .surgery import causal_lm, ttt_disabled

_AT_ONCE = 1 << 26
"""Logits made at a time; in float32, with the probabilities of them, half a gigabyte."""


def tokens_at_once(model: nn.Module, rows: int) -> int:
    """How many tokens of so many rows have their logits made at a time."""
    return max(1, _AT_ONCE // (causal_lm(model).config.get_text_config().vocab_size * rows))


def head_logits(model: nn.Module, read: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Logits [B, n, V], by the head and all that the family does after it, of `hidden` [B, n, d], which the base made of `ids` [B, n].

    read: any output of the base model; `hidden` is its last_hidden_state or a part of its tokens.
    """
    lm = causal_lm(model)
    own = hidden.clone(memory_format=torch.contiguous_format)  # a view into a row is read as a batch, for which the head's weight is copied
    with _having_read(lm, locate(lm).base, type(read)(last_hidden_state=own)):
        return lm(input_ids=ids, use_cache=False).logits


@contextmanager
def _having_read(lm: nn.Module, base: nn.Module, output: Any) -> Iterator[None]:
    """Within it the base model gives back `output`, whatever it is called with, so that `lm` is what comes after it."""
    own = vars(base).get("forward")
    base.forward = lambda *args, **kwargs: output
    try:
        with ttt_disabled(lm):
            yield
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own

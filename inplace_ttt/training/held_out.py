"""The loss on held-out rows without ever holding all logits, which at long rows outweigh everything else on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..families import locate
from ..surgery import causal_lm, ttt_disabled
from .packing import IGNORED

_AT_ONCE = 1 << 26
"""Logits made at a time; in float32, with the probabilities of them, half a gigabyte."""


@torch.no_grad()
def held_out_sums(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> Tensor:
    """float64 [3]: over the targets [B, T] that are not ignored, their losses, those that the likeliest token hits, their number.

    inputs: keyword arguments of the base model, input_ids [B, T] among them. The base model reads them in one call; its head,
    and whatever the family does to logits, then takes a few hundred tokens at a time.
    """
    lm = causal_lm(model)
    base, vocabulary = locate(lm).base, lm.config.get_text_config().vocab_size
    read = base(**inputs, use_cache=False)
    size = max(1, _AT_ONCE // (vocabulary * len(targets)))
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    for hidden, ids, wanted in zip(*(x.split(size, dim=1) for x in (read.last_hidden_state, inputs["input_ids"], targets)), strict=True):
        with _having_read(lm, base, type(read)(last_hidden_state=hidden)):
            logits = lm(input_ids=ids, use_cache=False).logits.float()
        sums[0] += cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
        sums[1] += ((logits.argmax(-1) == wanted) & (wanted != IGNORED)).sum()
        sums[2] += (wanted != IGNORED).sum()
    return sums


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

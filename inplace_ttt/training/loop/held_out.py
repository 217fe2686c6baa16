"""The loss on held-out rows without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...families import locate
from ...language_head import head_logits, tokens_at_once
from ...surgery import causal_lm
from ...tasks import IGNORED


@torch.no_grad()
def held_out_sums(model: nn.Module, inputs: dict[str, Any], targets: Tensor) -> Tensor:
    """float64 [3]: over the targets [B, T] that are not ignored, their losses, those that the likeliest token
    hits, their number.

    inputs: keyword arguments of the base model, input_ids [B, T] among them. The base model reads them in one
        call; its head,
    and whatever the family does to logits, then takes a few hundred tokens at a time.
    """
    read = locate(causal_lm(model)).base(**inputs, use_cache=False)
    size = tokens_at_once(model, len(targets))
    sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
    for hidden, ids, wanted in zip(
        *(x.split(size, dim=1) for x in (read.last_hidden_state, inputs["input_ids"], targets)), strict=True
    ):
        logits = head_logits(model, read, hidden, ids).float()
        sums[0] += cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        sums[1] += ((logits.argmax(-1) == wanted) & (wanted != IGNORED)).sum()
        sums[2] += (wanted != IGNORED).sum()
    return sums

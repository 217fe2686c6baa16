"""The loss on held-out rows, computed without holding all logits at once."""

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
    """Sums losses and hits over the targets that are not ignored.

    The base model reads all inputs in one call. The head, and the family's changes of logits, process a
    few hundred tokens at a time.

    Args:
        model: a causal language model.
        inputs: keyword arguments of the base model, with input_ids [B, T].
        targets: int64 [B, T], `IGNORED` at places without a target.

    Returns:
        float64 [3]: sum of losses in nats, targets that the likeliest token hits, number of targets.
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

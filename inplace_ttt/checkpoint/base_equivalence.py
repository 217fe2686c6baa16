"""Checks that a fresh conversion computes the same logits as its base (law L6)."""

from __future__ import annotations

import gc
import os

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from ..surgery import check_behavior
from .loading import load_base
from .opened import load

TOKENS = 256


def max_logit_difference(base: str | os.PathLike[str], converted: str | os.PathLike[str]) -> float:
    """Returns the largest |logit difference| between two checkpoints.

    The input is one row of `TOKENS` seeded random tokens. Only one model is in memory at a time.

    Raises:
        InPlaceTTTError: if the base's own logits are not finite.
    """
    expected = _logits(load_base(base))
    if not expected.isfinite().all():
        raise InPlaceTTTError(
            f"{base} computes logits that are not finite; its weights are damaged, or their dtype is too "
            "narrow."
        )
    gc.collect()
    model = load(converted)
    check_behavior(model)
    found = _logits(model)
    return float((found - expected).abs().max())


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    text = model.config.get_text_config()
    length = min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)
    ids = torch.randint(text.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return model(ids.to(model.device)).logits.float().cpu()

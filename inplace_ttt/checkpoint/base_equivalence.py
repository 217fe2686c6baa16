"""Proof that a fresh conversion computes what its base computes (law L6)."""

from __future__ import annotations

import gc
import os

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InPlaceTTTError
from ..surgery import check_behaviour
from .loading import load_base
from .opened import load

TOKENS = 256


def max_logit_difference(base: str | os.PathLike[str], converted: str | os.PathLike[str]) -> float:
    """Largest |logit difference| between two checkpoints over `TOKENS` seeded random tokens, one model in
    memory at a time.

    Raises InPlaceTTTError for a base whose own logits are not finite.
    """
    expected = _logits(load_base(base))
    if not expected.isfinite().all():
        raise InPlaceTTTError(
            f"{base} computes logits that are not finite; its weights are damaged, or their dtype too narrow."
        )
    gc.collect()
    model = load(converted)
    check_behaviour(model)
    found = _logits(model)
    return float((found - expected).abs().max())


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    text = model.config.get_text_config()
    length = min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)
    ids = torch.randint(text.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return model(ids.to(model.device)).logits.float().cpu()

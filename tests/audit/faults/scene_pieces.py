"""The pieces in which scenes read a text, and the numbers that scenes compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from models import logits
from torch import Tensor
from transformers import PreTrainedModel

from inplace_ttt.families import CACHE

Numbers = dict[str, Tensor]
PIECES = (3, 1, 9, 1, 1, 2, 16, 5, 1, 1, 9)


def read_on(model: PreTrainedModel, cache: Any, ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Logits of ids read in pieces on top of what a cache holds."""
    return torch.cat(
        [logits(model, piece, **{CACHE: cache}, use_cache=True) for piece in ids.split(list(sizes), 1)], 1
    )

"""Token losses of documents read piece by piece through a KV cache: the same function as one call (law L2),
in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Cache, DynamicCache, PreTrainedModel

from ..attention_window import SINKS, attention_window, window_cache
from ..errors import InPlaceTTTError
from ..families import CACHE, locate
from ..language_head import head_logits
from ..layer.cache import streams
from ..layer.overrides import with_config
from ..surgery import causal_lm, fast_weights

PIECE = 512
"""Tokens read at once by a model without chunks."""

Progress = Callable[[int], Any]
"""Told how many tokens were read."""


@torch.no_grad()
def token_losses(
    model: PreTrainedModel,
    rows: Tensor,
    *,
    piece: int = PIECE,
    window: int | None = None,
    sinks: int = SINKS,
    lenders: int = 0,
    before_piece: Callable[[Cache], Any] | None = None,
    progress: Progress = lambda tokens: None,
) -> Tensor:
    """-log p of every next token, float32 [B, T - 1] on the CPU, for rows of token ids [B, T] without
    padding.

    What chunks write is read, also where the config has `prompt_write`: in a text no prompt ends.
    window, sinks: attention as in `attention_window`; all of the row without a window.
    lenders: rows in front of those B, which are read for the state that they write, and have no logits made.
    before_piece: called with the cache before each piece of `piece` tokens. Raises InPlaceTTTError for losses
        that are not finite.
    """
    rows = rows.to(model.device)
    cache = (
        DynamicCache(config=model.config.get_text_config())
        if window is None
        else window_cache(model, window, sinks)
    )
    base, found = locate(causal_lm(model)).base, []
    with attention_window(model, window, sinks), with_config(fast_weights(model).values(), prompt_write=None):
        for start in range(0, rows.shape[1], piece):
            if before_piece is not None:
                before_piece(cache)
            here, targets = rows[:, start : start + piece], rows[lenders:, start + 1 : start + piece + 1]
            read = base(input_ids=here, **{CACHE: cache}, use_cache=True)
            logits = head_logits(model, read, read.last_hidden_state[lenders:], here[lenders:])
            losses = torch.stack(list(_losses(logits, targets)))
            if not losses.isfinite().all():
                first = start + 1 + int((~losses.isfinite()).any(0).int().argmax())
                raise InPlaceTTTError(
                    f"losses are not finite from token {first:,} of a text on; `inplace-ttt diagnose` says "
                    "why."
                )
            found.append(losses)
            progress(here.numel())
    return torch.cat(found, dim=1).cpu()


def mismatched_losses(
    model: PreTrainedModel, rows: Tensor, lenders: Tensor, *, piece: int, **settings: Any
) -> Tensor:
    """Token losses [B, T - 1] of rows [B, T] that read, chunk by chunk, the state that the row at their place
    in `lenders` writes.

    Each lender is in the batch and reads its own state, which has as many writes as the reader's would
    (cross-document state).
    piece: the chunk size.
    """
    count = len(rows)
    sources = [*range(count), *range(count)]

    def lend(cache: Cache) -> None:
        for stream in streams(cache).values():
            stream.lend(sources)

    return token_losses(
        model, torch.cat([lenders, rows]), piece=piece, lenders=count, before_piece=lend, **settings
    )


def _losses(logits: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Row by row, since float32 logits of the whole batch are large."""
    for row, target in zip(logits, targets, strict=True):
        yield cross_entropy(row[: len(target)].float(), target, reduction="none")

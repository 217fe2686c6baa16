"""Computes the token losses of documents, read in pieces through a KV cache.

The result equals that of one forward pass (law L2 in tests/laws), with less memory.
"""

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
"""Tokens per piece for a model without chunks."""

Progress = Callable[[int], Any]
"""Called with the number of tokens that were read."""


def reading_cache(model: PreTrainedModel, window: int | None, sinks: int) -> Cache:
    """Returns an empty cache for reading with an attention window, or with the model's own attention."""
    if window is None:
        return DynamicCache(config=model.config.get_text_config())
    return window_cache(model, window, sinks)


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
    """Computes -log p of every next token, for rows without padding.

    The text holds no prompt, so every chunk is written and read even if the config has `prompt_write`.

    Args:
        model: a converted model or a base.
        rows: token ids [lenders + B, T].
        piece: tokens per forward pass.
        window: attention window in tokens; None for full attention.
        sinks: first tokens that stay visible in addition to the window.
        lenders: number of leading rows that are read only for the state that they write; their logits are not
            computed.
        before_piece: called with the cache before each piece.
        progress: called with the number of tokens after each piece.

    Returns:
        float32 [B, T - 1] in nats, on the CPU.

    Raises:
        InPlaceTTTError: if a loss is NaN or infinite.
    """
    rows = rows.to(model.device)
    cache = reading_cache(model, window, sinks)
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
                    f"losses are not finite from token {first:,} of a text on; run `inplace-ttt diagnose` "
                    "to find the cause."
                )
            found.append(losses)
            progress(here.numel())
    return torch.cat(found, dim=1).cpu()


def mismatched_losses(
    model: PreTrainedModel, rows: Tensor, lenders: Tensor, *, piece: int, **settings: Any
) -> Tensor:
    """Computes token losses of rows that read another document's state (cross-document state).

    Chunk by chunk, each row reads the state that the row with the same index in `lenders` has written. The
    lenders are in the batch too, and read their own states. The state that a row reads has as many writes as
    its own state would have.

    Args:
        model: a converted model.
        rows: token ids [B, T] of the readers.
        lenders: token ids [B, T] of the documents that write.
        piece: the chunk size.
        **settings: further arguments of `token_losses`.

    Returns:
        float32 [B, T - 1] in nats, on the CPU.
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
    """Yields losses row by row, because float32 logits of a full batch take much memory."""
    for row, target in zip(logits, targets, strict=True):
        yield cross_entropy(row[: len(target)].float(), target, reduction="none")

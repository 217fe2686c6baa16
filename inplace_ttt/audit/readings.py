"""Readings of a prepared model: rows in one call, packed, padded, or through a cache in pieces.

The model runs as a user runs it. Each function returns the record of a reading and the documents in it.
`scenes` and `ways` list the readings in which a model must compute its declared rule.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from ..families import CACHE
from .prepared import Prepared, Reading
from .recording import Document, Documents, Piece


@dataclass(frozen=True)
class Rows:
    """A step of `streamed` that moves the rows of a cache.

    Attributes:
        order: for each new row, the old row that it goes on from.
        method: the cache's method that does it.
    """

    order: tuple[int, ...]
    method: str = "reorder_cache"


@dataclass(frozen=True)
class Crop:
    """A step of `streamed` that takes tokens back."""

    tokens: int


RESET = "reset"
"""A step of `streamed` that resets the cache. The next steps read other texts."""
Step = int | Rows | Crop | str
"""A step of `streamed`. A number is that of the tokens to read."""


def streamed(
    probed: Prepared,
    rows: int,
    steps: Sequence[Step],
    cache: DynamicCache | None = None,
    around: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext(),
) -> tuple[Any, Documents]:
    """Reads rows through one cache in pieces.

    Args:
        probed: the prepared model.
        rows: the number of rows at the start.
        steps: what to do, in this order.
        cache: the cache; a new one by default.
        around: returns the context of a piece by its number.
    """
    cache = cache or probed.cache()
    number = known = 0
    texts: list[list[Piece]] = [[] for _ in range(rows)]
    done: list[list[Piece]] = []
    with probed.recording() as record:
        for step in steps:
            if isinstance(step, int):
                ids = probed.ids(len(texts), step, number)
                with around(number):
                    probed.forward(ids, **{CACHE: cache}, use_cache=True)
                for row, text in enumerate(texts):
                    text.append(Piece(number, row, 0, step, _writes(probed, step, known)))
                number, known = number + 1, known + step
            elif isinstance(step, Rows):
                order = torch.tensor(step.order, device=probed.ids(1, 1).device)
                repeats = step.method == "batch_repeat_interleave"
                getattr(cache, step.method)(len(step.order) // len(texts) if repeats else order)
                texts = [list(texts[row]) for row in step.order]
            elif isinstance(step, Crop):
                cache.crop(-step.tokens)
                texts = [_without_last(text, step.tokens) for text in texts]
                known -= step.tokens
            else:
                cache.reset()
                done, texts, known = [*done, *texts], [[] for _ in texts], 0
    return record, [*done, *texts]


def _without_last(text: list[Piece], tokens: int) -> list[Piece]:
    """Returns the text without its last tokens, which are whole pieces."""
    kept = list(text)
    while tokens > 0:
        tokens -= kept[-1].stop - kept.pop().start
    assert tokens == 0
    return kept


def _writes(probed: Prepared, tokens: int, known: int) -> bool:
    """Returns True if a piece of this number of tokens fills chunks.

    A single token that is read into a filled cache counts as generated.
    """
    return probed.config.update_on_decode or tokens > 1 or known == 0


def over_an_edge(at: int, chunk: int, tokens: int) -> list[int]:
    """Returns sizes of pieces that cross the next chunk edge one token at a time.

    The first piece ends two tokens before the edge. Four single tokens follow, then all others.

    Args:
        at: tokens read before.
        chunk: tokens per chunk.
        tokens: the sum of the sizes.
    """
    ahead = (chunk - 2 - at) % chunk
    return [*([ahead] if ahead else []), 1, 1, 1, 1, tokens - ahead - 4]


def whole(probed: Prepared, name: str, rows: int, tokens: int, **kwargs: Any) -> Reading:
    """Reads rows in one call, each of them one document."""
    record = probed.read(probed.ids(rows, tokens), **kwargs)
    return name, record, record.whole()


def packed(
    probed: Prepared, rows: Sequence[Sequence[int]], first_positions: Sequence[int] = (), **kwargs: Any
) -> tuple[Any, Documents]:
    """Reads rows of packed documents in one call.

    Args:
        probed: the prepared model.
        rows: lengths of the documents in each row.
        first_positions: the position id at which each document of a row begins; 0 by default.
        kwargs: further arguments of the model's forward.
    """
    firsts = first_positions or [0] * max(len(lengths) for lengths in rows)
    positions = torch.stack(
        [torch.cat([first + torch.arange(n) for first, n in zip(firsts, row, strict=False)]) for row in rows]
    )
    ids = probed.ids(*positions.shape)
    record = probed.read(ids, position_ids=positions.to(ids.device), **kwargs)
    found: list[Document] = []
    for row, lengths in enumerate(rows):
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        found += [[Piece(0, row, start, stop)] for start, stop in itertools.pairwise(starts)]
    return record, found


def padded(
    probed: Prepared, lengths: Sequence[int], left: bool, sizes: Sequence[int] = ()
) -> tuple[Any, Documents]:
    """Reads padded rows in one call, or through a cache in pieces.

    Args:
        probed: the prepared model.
        lengths: tokens of each row.
        left: True for padding on the left.
        sizes: tokens per piece; empty for one call.
    """
    longest = max(lengths)
    spans = [(longest - n, longest) if left else (0, n) for n in lengths]
    ids = probed.ids(len(lengths), longest)
    mask = torch.zeros_like(ids)
    for row, (start, stop) in enumerate(spans):
        mask[row, start:stop] = 1
    # `generate` passes position_ids too, since Qwen's vision-language models need them with a longer mask.
    # The logits of a padded row equal those of the row alone only with its own positions.
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = probed.takes_positions and (bool(sizes) or not probed.by_layers)
    cached: dict[str, Any] = {CACHE: probed.cache(), "use_cache": True} if sizes else {"use_cache": False}
    texts: list[list[Piece]] = [[] for _ in lengths]
    with probed.recording() as record:
        for number, (begin, end) in enumerate(
            itertools.pairwise(itertools.accumulate([0, *(sizes or [longest])]))
        ):
            given = {"position_ids": positions[:, begin:end]} if wanted else {}
            probed.forward(ids[:, begin:end], attention_mask=mask[:, :end], **given, **cached)
            for text, row, (start, stop) in zip(texts, range(len(lengths)), spans, strict=True):
                if end > start:
                    span = max(start - begin, 0), min(stop, end) - begin
                    text.append(Piece(number, row, *span, _writes(probed, end - begin, begin)))
    return record, texts


@contextmanager
def recomputing(lm: Any) -> Iterator[bool]:
    """Turns gradient checkpointing on inside the context and restores it on exit.

    Yields:
        True if the model supports it.
    """
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    modules = [module for module in lm.modules() if hasattr(module, names[0])]
    before = [{name: vars(module)[name] for name in names if name in vars(module)} for module in modules]
    try:
        for module in modules:
            vars(module).update(
                zip(names, (True, functools.partial(checkpoint, use_reentrant=False)), strict=True)
            )
        yield bool(modules) and lm.supports_gradient_checkpointing
    finally:
        for module, own in zip(modules, before, strict=True):
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(own)


def training_rows(probed: Prepared) -> Reading:
    """Reads a packed row with a document of nine chunks and one shorter document.

    A model that does not accept packed documents reads a row of ten chunks.
    """
    chunk = probed.chunk
    if not probed.takes_documents:
        return whole(probed, "a row of ten chunks", 1, 10 * chunk + 7)
    return "a row of documents", *packed(probed, [[9 * chunk + 3, chunk + 4]])


def padded_training_rows(probed: Prepared) -> Reading:
    """Reads two rows of unequal lengths, or of one length if the model accepts no padding."""
    chunk = probed.chunk
    if not probed.takes_padding:
        return whole(probed, f"rows, chunks of {chunk} tokens", 2, 3 * chunk + 4)
    rows = padded(probed, [3 * chunk + 4, 2 * chunk + 1], left=True)
    return f"padded rows, chunks of {chunk} tokens", *rows

"""Which rows of texts a calibration reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..files.text import begins_of
from ..texts.documents import Document, tokens_of

logger = logging.getLogger(__name__)

ROW = 2048
"""Tokens of a text that are read at once."""

_SHORTEST = 16
"""Tokens of a text's last row: a row counts as much as any other where norms are measured, and a first token
has one like no other."""

_NEAR = 64
"""No row is begun for the last 64th of the tokens, nor for less than half a row."""


def calibration_rows(
    documents: Sequence[Document], tokenizer: Any, tokens: int
) -> list[tuple[Document, Tensor]]:
    """Token ids [1, T ≤ ROW], each with its file: about `tokens` in all, in whole rows; fewer, with a
    warning, where there are no more.

    One row a text, of texts spread over all of them; where that is too little, of the others too, and then
    second rows, and so on.
    """
    stride = max(1, len(documents) // max(1, tokens // ROW))
    length = -(-tokens // max(len(documents[::stride]), -(-tokens // ROW)))
    enough = tokens - min(tokens // _NEAR, length // 2)
    texts = (
        _rows(document, tokenizer, length, tokens)
        for first in range(stride)
        for document in documents[first::stride]
    )
    found, read = list[tuple[Document, Tensor]](), 0
    for document, row in _in_turn(texts):
        found.append((document, row))
        read += row.shape[1]
        if read >= enough:
            break
    else:
        logger.warning(
            "the calibration read %s tokens, all that its texts hold, of %s; give it more text",
            f"{read:,}",
            f"{tokens:,}",
        )
    return found


def _rows(document: Document, tokenizer: Any, length: int, most: int) -> Iterator[tuple[Document, Tensor]]:
    """A text's rows, each with what the tokenizer puts before a text; what is behind the first is read when
    it is asked for."""
    first = tokens_of(document, tokenizer, length)
    yield document, first
    if first.shape[1] == length:
        begins = torch.tensor([begins_of(tokenizer)], dtype=torch.int64)
        for rest in tokens_of(document, tokenizer, most)[:, length:].split(length - begins.shape[1], dim=1):
            if rest.shape[1] >= _SHORTEST:
                yield document, torch.cat([begins, rest], dim=1)


def _in_turn(texts: Iterable[Iterator[tuple[Document, Tensor]]]) -> Iterator[tuple[Document, Tensor]]:
    """The first of each, then the second of each that has one, and so on."""
    while True:
        longer = []
        for text in texts:
            if (row := next(text, None)) is not None:
                longer.append(text)
                yield row
        if not longer:
            return
        texts = longer

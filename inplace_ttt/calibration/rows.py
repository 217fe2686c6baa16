"""Selects the rows of texts that a calibration reads."""

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
"""Number of tokens of a full row, unless the caller wants longer rows."""

_SHORTEST = 16
"""Smallest number of tokens of a text's last row.

In the medians of norms every row counts alike, and the activations of a first token are exceptional.
"""

_NEAR = 64
"""Fraction of the tokens, as a divisor, for which no further row is started.

A further row is not started for less than half a row either.
"""


def calibration_rows(
    documents: Sequence[Document], tokenizer: Any, tokens: int, row: int = ROW
) -> list[tuple[Document, Tensor]]:
    """Selects about `tokens` tokens in whole rows.

    It takes one row per text, from texts spread over all of them. If that is too little, it takes the first
    rows of the other texts too, then second rows, and so on. If the texts hold fewer tokens, it warns.

    Args:
        documents: the texts.
        tokenizer: the model's tokenizer.
        tokens: number of tokens to select.
        row: number of tokens of a full row.

    Returns:
        Token ids [1, T ≤ row] of each row, each with its document.
    """
    stride = max(1, len(documents) // max(1, tokens // row))
    length = -(-tokens // max(len(documents[::stride]), -(-tokens // row)))
    enough = tokens - min(tokens // _NEAR, length // 2)
    texts = (
        _rows(document, tokenizer, length, tokens)
        for first in range(stride)
        for document in documents[first::stride]
    )
    found, read = list[tuple[Document, Tensor]](), 0
    for document, ids in _in_turn(texts):
        found.append((document, ids))
        read += ids.shape[1]
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

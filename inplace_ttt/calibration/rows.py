"""Selects the rows that a calibration reads, from texts."""

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

Every row has the same weight in the sums of medians. The activations of a row's first token are exceptional,
and would distort a very short row.
"""

_NEAR = 64
"""Divisor of the number of tokens.

No further row is read if the missing tokens are at most this part of all tokens, and at most half a row.
"""


def calibration_rows(
    documents: Sequence[Document], tokenizer: Any, tokens: int, row: int = ROW
) -> list[tuple[Document, Tensor]]:
    """Selects about `tokens` tokens in whole rows.

    It first selects one row per text, from texts at equal distances in the sequence. If these are too few
    tokens, it adds the first rows of the other texts, then second rows, and so on. It logs a warning if the
    texts have fewer tokens than asked for.

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
            "the calibration read all %s tokens of its texts, but wants %s; give it more text",
            f"{read:,}",
            f"{tokens:,}",
        )
    return found


def _rows(document: Document, tokenizer: Any, length: int, most: int) -> Iterator[tuple[Document, Tensor]]:
    """Yields a text's rows, each with the special tokens that begin a text.

    The text after the first row is tokenized only if a second row is needed.
    """
    first = tokens_of(document, tokenizer, length)
    yield document, first
    if first.shape[1] == length:
        begins = torch.tensor([begins_of(tokenizer)], dtype=torch.int64)
        for rest in tokens_of(document, tokenizer, most)[:, length:].split(length - begins.shape[1], dim=1):
            if rest.shape[1] >= _SHORTEST:
                yield document, torch.cat([begins, rest], dim=1)


def _in_turn(texts: Iterable[Iterator[tuple[Document, Tensor]]]) -> Iterator[tuple[Document, Tensor]]:
    """Yields the first row of each text, then the second row of each text that has one, and so on."""
    while True:
        longer = []
        for text in texts:
            if (row := next(text, None)) is not None:
                longer.append(text)
                yield row
        if not longer:
            return
        texts = longer

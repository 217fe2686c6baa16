"""Which rows of texts a calibration reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files.text import begins_of, tokens_of

logger = logging.getLogger(__name__)

ROW = 2048
"""Tokens of a text that are read at once."""

_SHORTEST = 16
"""Tokens of a text's last row: a row counts as much as any other where norms are measured, and a first token
has one like no other."""

_NEAR = 64
"""No row is begun for the last 64th of the tokens, nor for less than half a row."""


def calibration_rows(files: Sequence[Path], tokenizer: Any, tokens: int) -> list[tuple[Path, Tensor]]:
    """Token ids [1, T ≤ ROW], each with its file: about `tokens` in all, in whole rows; fewer, with a
    warning, where there are no more.

    One row a text, of texts spread over all of them; where that is too little, of the others too, and then
    second rows, and so on.
    """
    stride = max(1, len(files) // max(1, tokens // ROW))
    length = -(-tokens // max(len(files[::stride]), -(-tokens // ROW)))
    enough = tokens - min(tokens // _NEAR, length // 2)
    texts = (
        _rows(file, tokenizer, length, tokens) for first in range(stride) for file in files[first::stride]
    )
    found, read = list[tuple[Path, Tensor]](), 0
    for file, row in _in_turn(texts):
        found.append((file, row))
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


def _rows(file: Path, tokenizer: Any, length: int, most: int) -> Iterator[tuple[Path, Tensor]]:
    """A text's rows, each with what the tokenizer puts before a text; what is behind the first is read when
    it is asked for."""
    first = tokens_of(file, tokenizer, length)
    yield file, first
    if first.shape[1] == length:
        begins = torch.tensor([begins_of(tokenizer)], dtype=torch.int64)
        for rest in tokens_of(file, tokenizer, most)[:, length:].split(length - begins.shape[1], dim=1):
            if rest.shape[1] >= _SHORTEST:
                yield file, torch.cat([begins, rest], dim=1)


def _in_turn(texts: Iterable[Iterator[tuple[Path, Tensor]]]) -> Iterator[tuple[Path, Tensor]]:
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

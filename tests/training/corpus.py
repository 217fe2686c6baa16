"""A small corpus of which every word tells where it stood, and how rows are read back into its documents."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch

from inplace_ttt.layout import ChunkLayout
from inplace_ttt.training.recipe.data_section import Data
from inplace_ttt.training.recipe.recipe import Recipe
from inplace_ttt.training.recipe.sections import Model, Parallel
from inplace_ttt.training.recipe.training_section import Training

EOS, PAD = 1, 0
FIRST = 3  # the word w<n> is token n + FIRST
WORDS = 5000
LENGTHS = (50, 3, 1, 77, 20, 31, 8, 64, 100, 2)
LENGTH, CHUNK = 32, 8


def texts(lengths: tuple[int, ...] = LENGTHS, first: int = 0) -> list[str]:
    """Documents whose words are all different."""
    ends = [first + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [" ".join(f"w{n}" for n in range(a, b)) for a, b in itertools.pairwise(ends)]


def tokens(text: str) -> list[int]:
    return [int(word[1:]) + FIRST for word in text.split()] + [EOS]


def recipe(data: Data, parallel: Parallel | None = None) -> Recipe:
    return Recipe(Model(path="none"), data, Training(steps=1), output="none", parallel=parallel or Parallel())


def documents(rows: Any) -> list[list[int]]:
    """The documents of rows, those cut at a row's end put together again; every word tells where it stood."""
    found: list[list[int]] = []
    for row in rows:
        spans = ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], 1).documents[0]
        for start, stop in spans:
            piece = row["input_ids"][start:stop]
            if PAD in piece:
                continue
            if start == 0 and found and found[-1][-1] != EOS:
                found[-1] += piece
            else:
                found.append(piece)
    return found


def jsonl(file: Path, records: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return file

"""The small corpus as files, a tokenizer for it, and a call that makes rows of what it is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import word_level
from transformers import PreTrainedTokenizerFast

from inplace_ttt.training.data.building import TrainingData
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.recipe.data_section import Data
from inplace_ttt.training.recipe.sections import Parallel

from .corpus import CHUNK, EOS, FIRST, LENGTH, PAD, WORDS, recipe, texts


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    assert (PAD, EOS, FIRST) == (0, 1, 3)
    return word_level(f"w{n}" for n in range(WORDS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The documents as text files; `.hidden.txt` is none of them."""
    (tmp_path / "text" / "deeper").mkdir(parents=True)
    for i, text in reversed(list(enumerate(texts()))):
        (tmp_path / "text" / ("deeper" if i == 4 else ".") / f"{'abcdefghij'[i]}.txt").write_text(text)
    (tmp_path / "text" / ".hidden.txt").write_text("w0")
    return tmp_path / "text"


@pytest.fixture
def build(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., TrainingData]:
    def run(
        train: Any, chunk_size: int = CHUNK, parallel: Parallel | None = None, **data: Any
    ) -> TrainingData:
        names = [str(name) for name in (train if isinstance(train, list) else [train])]
        settings = {"sequence_length": LENGTH, "shuffle": False, "cache": str(tmp_path / "cache"), **data}
        return build_data(recipe(Data(train=names, **settings), parallel), tokenizer, chunk_size)

    return run

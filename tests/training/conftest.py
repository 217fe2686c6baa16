"""The small corpus as files, a tokenizer for it, a call that makes rows of what it is given, and saved models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import turn_writer_on
from tiny import word_level
from transformers import PreTrainedTokenizerFast

from inplace_ttt import revert, save_adapter
from inplace_ttt.training.data.building import TrainingData
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.data_section import Data
from inplace_ttt.training.recipe.sections import Parallel

from .corpus import CHUNK, EOS, FIRST, LENGTH, PAD, WORDS, recipe, texts
from .recipes import tiny_recipe
from .runs import checkpoint


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


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """The tiny model with a trained writer, in every form that `model.path` takes."""
    model = build_model(tiny_recipe(tmp_path))
    turn_writer_on(model)
    folders = {form: tmp_path / form for form in ("full", "base", "adapter")}
    model.save_pretrained(folders["full"])
    save_adapter(model, folders["adapter"], base=str(folders["base"]))
    revert(model).save_pretrained(folders["base"])
    return folders


@pytest.fixture
def reads_by_gradient(tmp_path: Path) -> Path:
    """A converted model whose targets are loss gradients."""
    return checkpoint(tmp_path / "gradient", {"target": "gradient", "eta": 0.3})

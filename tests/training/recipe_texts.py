"""A recipe as a text, changed, loaded or refused."""

from pathlib import Path

import pytest

from inplace_ttt import InPlaceTTTError
from inplace_ttt.training.recipe.recipe import Recipe, load_recipe

RECIPE = """\
model:
  path: somewhere
ttt:
  chunk_size: 16
data:
  train: book.txt
  sequence_length: 64
training:
  steps: 3
output: out
"""


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(file, overrides)


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(InPlaceTTTError) as refusal:
        load(folder, text, *overrides)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def changed(old: str, new: str) -> str:
    assert RECIPE.count(old) == 1
    return RECIPE.replace(old, new)

"""The rows of a recipe whose documents are on this machine."""

from __future__ import annotations

import glob
from pathlib import Path

from transformers import AutoTokenizer

from ...errors import InPlaceTTTError
from ..data.building import TrainingData
from ..data.data import build_data
from ..recipe.recipe import Recipe


def measured_data(recipe: Recipe, chunk_size: int) -> tuple[TrainingData | None, str]:
    """Builds the recipe's rows if its data is on this machine.

    Returns:
        The rows and "", or None and the reason.
    """
    missing = [
        name for name in recipe.data.train if not (Path(name).exists() or glob.glob(name, recursive=True))
    ]
    if missing:
        return None, f"the documents are not on this machine ({missing[0]})"
    try:
        tokenizer = (
            AutoTokenizer.from_pretrained(recipe.model.tokenizer_path) if recipe.data.recall is None else None
        )
        return build_data(recipe, tokenizer, chunk_size), ""
    except ImportError as error:
        return None, f"the rows cannot be built here ({error}); install the extra `train`"
    except (InPlaceTTTError, OSError, ValueError) as error:
        return None, f"the rows cannot be built: {str(error).rstrip('.')}"

"""Sections for models in folders, and what is trained on them."""

from pathlib import Path
from typing import Any

from models import random_ids

IDS = random_ids(1, 64)
LORA = {"trainable": "lora", "steps": 1, "lora": {"rank": 2}}


def at(path: Path, **more: Any) -> dict[str, Any]:
    """Sections for a model in a folder."""
    return {"model": {"path": str(path), "dtype": "float32", **more}, "ttt": None}

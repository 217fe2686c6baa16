"""Copies the files next to a checkpoint's weights: tokenizer, templates, generation config, license, code.

These are all files that do not hold weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from transformers import GenerationConfig

from ..converted_config import SHIM_FILE
from ..errors import InPlaceTTTError, reported
from ..files.json_files import parse_json
from .reading import ADAPTER_CONFIG, CONFIG, INDEX, WEIGHTS

_GENERATION = "generation_config.json"
_OTHERS = (CONFIG, INDEX, ADAPTER_CONFIG, SHIM_FILE, "README.md", "*.index.json")
"""Files that are not copied. Each writer makes its own, and a base's model card describes the base alone."""


def companions(folder: Path) -> Iterator[Path]:
    """Yields the files of a model folder that a checkpoint made from it also needs.

    The paths are relative to the folder, and include files in subfolders. Hidden files, weights of any
    format, and subfolders that are models or checkpoints themselves are left out.
    """
    for root, below, names in os.walk(folder):
        here = Path(root)
        below[:] = [
            name for name in below if not name.startswith(".") and not (here / name / CONFIG).exists()
        ]
        for name in names:
            left_out = name.startswith(".") or any(fnmatch(name, pattern) for pattern in (*WEIGHTS, *_OTHERS))
            if not left_out and (here / name).is_file():
                yield (here / name).relative_to(folder)


def copy_companions(source: Path, target: Path) -> None:
    """Copies the companions of `source` that `target` lacks.

    Raises:
        InPlaceTTTError: if a companion is a broken JSON file.
    """
    for name in companions(source):
        if (target / name).exists():
            continue
        _refuse_broken(source / name)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _refuse_broken(file: Path) -> None:
    """Raises InPlaceTTTError for a JSON file that cannot be used, before it is copied."""
    if file.suffix != ".json":
        return
    try:
        parse_json(file.read_bytes())
    except ValueError as error:
        raise InPlaceTTTError(
            f"{file} is not JSON ({error}); correct it, or remove it from the folder."
        ) from None
    if file.name == _GENERATION:
        with reported(f"{file} is not a generation config", "correct it, or remove it from the folder"):
            GenerationConfig.from_pretrained(file.parent).validate()

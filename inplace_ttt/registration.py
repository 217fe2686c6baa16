"""Converted checkpoints are known to transformers from the moment that it is imported; a command's --help imports neither."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_CLASSES = f"{__package__}.converted_class"
"""Registers the model_type, and makes model classes, from when it is imported."""


class _WithTransformers(MetaPathFinder):
    """Finds transformers as the other finders do, and imports our models once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "transformers":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            with suppress(ValueError):
                sys.meta_path.remove(self)
            importlib.import_module(_CLASSES)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Make converted checkpoints known to transformers now, if it is imported, or when it will be."""
    if "transformers" in sys.modules:
        importlib.import_module(_CLASSES)
    else:
        sys.meta_path.insert(0, _WithTransformers())

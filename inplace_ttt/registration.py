"""Registers converted checkpoints with transformers when transformers is imported.

This package need not import transformers itself, so its own import is fast.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_CLASSES = tuple(f"{__package__}.{name}" for name in ("converted_class", "adapter_class"))
"""Importing these modules registers the model_types."""


class _WithTransformers(MetaPathFinder):
    """Finds transformers through the other finders, and imports our model classes after it has loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
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
            _import_classes()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Registers the checkpoints now if transformers is imported already, or else at its import."""
    if "transformers" in sys.modules:
        _import_classes()
    else:
        sys.meta_path.insert(0, _WithTransformers())


def _import_classes() -> None:
    for name in _CLASSES:
        importlib.import_module(name)

"""In-Place Test-Time Training (arXiv 2604.06169) for pretrained Hugging Face language models.

Importing this package registers converted checkpoints with transformers. Public names are imported on first
use. A command's --help therefore loads no torch, and reading loads no Trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import InPlaceTTTError
from .registration import register

if TYPE_CHECKING:
    from .calibration.calibrate import calibrate
    from .checkpoint.opened import load
    from .checkpoint.to_adapter import save_adapter
    from .config import InPlaceTTTConfig
    from .config_tables import KeyWhitening, PromptWrite, UpdateClip
    from .session.session import Session
    from .surgery import convert, disable_ttt, revert
    from .training.loop.callback import InPlaceTTTCallback

__version__ = "0.1.0.dev0"

__all__ = [
    "InPlaceTTTCallback",
    "InPlaceTTTConfig",
    "InPlaceTTTError",
    "KeyWhitening",
    "PromptWrite",
    "Session",
    "UpdateClip",
    "__version__",
    "calibrate",
    "convert",
    "disable_ttt",
    "load",
    "revert",
    "save_adapter",
]

register()

_HOMES = {
    "InPlaceTTTCallback": "training.loop.callback",
    "InPlaceTTTConfig": "config",
    "KeyWhitening": "config_tables",
    "PromptWrite": "config_tables",
    "Session": "session.session",
    "UpdateClip": "config_tables",
    "calibrate": "calibration.calibrate",
    "convert": "surgery",
    "disable_ttt": "surgery",
    "load": "checkpoint.opened",
    "revert": "surgery",
    "save_adapter": "checkpoint.to_adapter",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

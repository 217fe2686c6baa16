"""In-Place Test-Time Training (arXiv 2604.06169) for pretrained Hugging Face language models."""

from typing import TYPE_CHECKING, Any

from .calibration.calibrate import calibrate
from .checkpoint.adapter import save_adapter
from .checkpoint.loading import load
from .config import DeltaClip, InPlaceTTTConfig, KeyWhitening
from .config_tables import PromptWrite
from .errors import InPlaceTTTError
from .state import FastWeightState
from .surgery import convert, revert, ttt_disabled

if TYPE_CHECKING:
    from .training.callback import InPlaceTTTCallback

__version__ = "0.1.0.dev0"

__all__ = [
    "DeltaClip",
    "FastWeightState",
    "InPlaceTTTCallback",
    "InPlaceTTTConfig",
    "InPlaceTTTError",
    "KeyWhitening",
    "PromptWrite",
    "__version__",
    "calibrate",
    "convert",
    "load",
    "revert",
    "save_adapter",
    "ttt_disabled",
]


def __getattr__(name: str) -> Any:
    """The callback brings transformers' Trainer and our training with it, which reading and serving do without."""
    if name == "InPlaceTTTCallback":
        from .training.callback import InPlaceTTTCallback

        return InPlaceTTTCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""In-Place Test-Time Training (arXiv 2604.06169) for pretrained Hugging Face language models."""

from .calibration import calibrate
from .checkpoint import load, save_adapter
from .config import DeltaClip, InPlaceTTTConfig, KeyWhitening
from .errors import InPlaceTTTError
from .state import FastWeightState
from .surgery import convert, revert, ttt_disabled
from .version import __version__

__all__ = [
    "DeltaClip",
    "FastWeightState",
    "InPlaceTTTConfig",
    "InPlaceTTTError",
    "KeyWhitening",
    "__version__",
    "calibrate",
    "convert",
    "load",
    "revert",
    "save_adapter",
    "ttt_disabled",
]

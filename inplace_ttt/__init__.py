"""In-Place Test-Time Training (arXiv 2604.06169) for pretrained Hugging Face language models."""

from .calibration.calibrate import calibrate
from .checkpoint.adapter import save_adapter
from .checkpoint.loading import load
from .config import DeltaClip, InPlaceTTTConfig, KeyWhitening
from .config_tables import PromptWrite
from .errors import InPlaceTTTError
from .state import FastWeightState
from .surgery import convert, revert, ttt_disabled

__version__ = "0.1.0.dev0"

__all__ = [
    "DeltaClip",
    "FastWeightState",
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

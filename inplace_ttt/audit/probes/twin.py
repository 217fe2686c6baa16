"""A small model that this package converts with the settings of the audited model.

It is used for measurements on fresh conversions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from ... import surgery
from ...calibration.calibrate import calibrate
from ...checkpoint import writing
from ...checkpoint.opened import load
from ...checkpoint.reading import Checkpoint
from ...config import InPlaceTTTConfig
from ...errors import errors_only

TWIN_RANGE = 0.03
"""Initializer range of the small model.

It differs from the usual 0.02, which reveals code that ignores it.
"""


@contextmanager
def twin(config: InPlaceTTTConfig, layers: tuple[int, ...] = (0, 1), width: int = 128) -> Iterator[Any]:
    """Yields a three-layer Llama of this width, converted by this package with these settings."""
    settings = _settings(config, layers)
    with _in_silence():
        model = surgery.convert(base_of_twin(width), settings)
        if settings.needs_calibration:
            calibrate(model, [calibration_ids()])
        yield model


@contextmanager
def twin_on_disk(config: InPlaceTTTConfig, layers: tuple[int, ...]) -> Iterator[Any]:
    """Yields the base of `twin`, converted as a folder and loaded, without calibration."""
    with _in_silence(), TemporaryDirectory() as folder:
        base_of_twin().save_pretrained(Path(folder) / "base")
        checkpoint = Checkpoint.open(Path(folder) / "base")
        plan = writing.plan_conversion(checkpoint, _settings(config, layers))
        out = Path(folder) / "converted"
        out.mkdir()
        writing.write_full(
            out,
            checkpoint,
            plan,
            writing.initial_tensors(checkpoint, plan),
            writing.describe_base(checkpoint, plan),
        )
        yield load(out)


def base_of_twin(width: int = 128) -> Any:
    """Returns the Llama before its conversion, with the same weights at each call."""
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=1 << 20,
        initializer_range=TWIN_RANGE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(shape).eval()


def _settings(config: InPlaceTTTConfig, layers: tuple[int, ...]) -> InPlaceTTTConfig:
    eta = config.eta[0] if isinstance(config.eta, tuple) and len(config.eta) != len(layers) else config.eta
    return dataclasses.replace(config, layers=layers, eta=eta)


@contextmanager
def _in_silence() -> Iterator[None]:
    """Mutes a conversion's warnings and the progress bars of transformers inside the context.

    Both would interrupt the audit's own output.
    """
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        with errors_only("inplace_ttt.surgery"):
            yield
    finally:
        if shown:
            enable_progress_bar()


def calibration_ids() -> Tensor:
    """Returns the token ids [1, T] on which a `twin` is calibrated."""
    return torch.randint(64, (1, 512), generator=torch.Generator().manual_seed(0))

"""A small model that this package converts with the settings of the one under audit, for what is seen on a fresh conversion."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ... import surgery
from ...calibration.calibrate import calibrate
from ...config import InPlaceTTTConfig


@contextmanager
def twin(config: InPlaceTTTConfig, layers: tuple[int, ...] = (0, 1), before: Tensor | None = None) -> Iterator[Any]:
    """A three-layer Llama, converted by this package with these settings. `before`: also its logits on ids, unconverted."""
    eta = config.eta if not isinstance(config.eta, tuple) else config.eta[0]
    settings = dataclasses.replace(config, layers=layers, eta=eta)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=1 << 20
    )
    level = logging.getLogger("inplace_ttt.surgery").level
    logging.getLogger("inplace_ttt.surgery").setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(shape).eval()
        if before is not None:
            with torch.no_grad():
                model.logits_before = model(before, use_cache=False).logits
        converted = surgery.convert(model, settings)
        if settings.needs_calibration:
            calibrate(converted, [calibration_ids()])
        yield converted
    finally:
        logging.getLogger("inplace_ttt.surgery").setLevel(level)


def calibration_ids() -> Tensor:
    """The text [1, T] that a `twin` is measured on."""
    return torch.randint(64, (1, 512), generator=torch.Generator().manual_seed(0))

"""The model that a fault is planted in: what is audited, and what scenes run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from families import BY_NAME, build
from models import CHUNK, random_ids, turn_writer_on
from transformers import PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, calibrate, convert
from inplace_ttt.audit import Report, audit_model
from inplace_ttt.surgery import config_of

Spoil = Callable[[PreTrainedModel], None]
_SIZES = ("num_hidden_layers", "max_position_embeddings", "intermediate_size")
_GPT2_SIZES = ("n_layer", "n_positions", "n_inner")


@dataclass(frozen=True)
class World:
    """A tiny converted model. ttt_layers: how many of its layers are fast weights. settings: of its TTT
    config. inner: width of keys."""

    family: str = "llama"
    dtype: torch.dtype = torch.float32
    ttt_layers: int = 2
    inner: int = 48
    settings: tuple[tuple[str, Any], ...] = ()

    def audited(self, spoil: Spoil | None = None) -> Report:
        """The audit of a fresh conversion: every sixth layer, as the paper has it."""
        model = self._converted(
            self._base(depth=6 * self.ttt_layers - 5, positions=8192), **dict(self.settings)
        )
        if spoil is not None:
            spoil(model)
        return audit_model(model)

    def model(
        self, chunk_size: int = CHUNK, spoil: Spoil | None = None, writes: bool = True, **settings: Any
    ) -> PreTrainedModel:
        """A model of three layers, with its writer on, in evaluation mode."""
        layers = (0, 2) if self.ttt_layers == 2 else (0, 1, 2)
        model = self._converted(
            self._base(depth=3, positions=512),
            **{"layers": layers, "chunk_size": chunk_size, **dict(self.settings), **settings},
        )
        if writes:
            turn_writer_on(model)
        if spoil is not None:
            spoil(model)
        return model

    def _base(self, depth: int, positions: int) -> PreTrainedModel:
        names = _GPT2_SIZES if "n_layer" in BY_NAME[self.family].overrides else _SIZES
        return build(
            self.family, dtype=self.dtype, **dict(zip(names, (depth, positions, self.inner), strict=True))
        )

    @staticmethod
    def _converted(base: PreTrainedModel, **settings: Any) -> PreTrainedModel:
        model = convert(base, InPlaceTTTConfig(**settings))
        if config_of(model).needs_calibration:
            calibrate(model, [random_ids(1, 64, seed=2)])
        return model


USUAL = World()


def world_of(values: dict[str, Any]) -> World:
    """A world by what differs from the usual one."""
    settings = tuple(sorted(values.get("settings", {}).items()))
    return World(**{**values, "settings": settings})

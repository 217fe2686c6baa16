"""Reads the settings of this package in a client's own YAML, and converts the model accordingly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..files.schema import from_values
from ..surgery import convert, is_converted
from ..training.loop.callback import InPlaceTTTCallback


@dataclass(frozen=True)
class ClientSettings:
    """The section `inplace_ttt` of a client's YAML.

    Attributes:
        ttt: settings of the conversion; `preset` gives those that are left out. None for a model that is
            already converted.
        training: settings of `InPlaceTTTCallback`.
    """

    ttt: InPlaceTTTConfig | None = None
    training: InPlaceTTTCallback = field(default_factory=InPlaceTTTCallback)


def settings_of(values: Mapping[str, Any] | None) -> ClientSettings:
    """Returns the section `inplace_ttt` of a client's YAML.

    Raises:
        InPlaceTTTError: if a key or value is invalid; the message has the key's path.
    """
    return from_values(ClientSettings, values or {}, "inplace_ttt")


def prepare(model: nn.Module, surgery: InPlaceTTTConfig | None) -> nn.Module:
    """Converts a client's loaded model in place and returns it.

    Args:
        model: the loaded model.
        surgery: settings of the conversion; None for a model that is already converted.

    Raises:
        InPlaceTTTError: if the settings are missing, do not apply, or need calibration.
    """
    if is_converted(model):
        if surgery is not None:
            raise InPlaceTTTError(
                "the model is converted already, so inplace_ttt.ttt does nothing; remove it, or give "
                "the base."
            )
        return model
    if surgery is None:
        raise InPlaceTTTError(
            "the model is not converted and inplace_ttt.ttt is missing; add it, or give a converted folder."
        )
    if surgery.needs_calibration:
        raise InPlaceTTTError(
            "these settings of inplace_ttt.ttt need measurements on a text; run `inplace-ttt convert MODEL "
            "OUT --calibrate TEXT` with "
            "them, give OUT as the model, and remove inplace_ttt.ttt."
        )
    return convert(model, surgery)

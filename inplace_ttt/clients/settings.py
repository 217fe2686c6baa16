"""What a client's own YAML says of us, and the conversion it asks for."""

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
    """ttt: what is converted and how, with `preset` for where the rest comes from; none for a model that is
        converted already.

    training: the settings of `InPlaceTTTCallback`.
    """

    ttt: InPlaceTTTConfig | None = None
    training: InPlaceTTTCallback = field(default_factory=InPlaceTTTCallback)


def settings_of(values: Mapping[str, Any] | None) -> ClientSettings:
    """The section `inplace_ttt` of a client's YAML. Raises InPlaceTTTError with the path of the key that is
    wrong."""
    return from_values(ClientSettings, values or {}, "inplace_ttt")


def prepare(model: nn.Module, surgery: InPlaceTTTConfig | None) -> nn.Module:
    """Convert a client's loaded model in place as its settings say; one that is converted already needs none.
    Returns the model."""
    if is_converted(model):
        if surgery is not None:
            raise InPlaceTTTError(
                "the model is converted already, so that inplace_ttt.ttt has no effect; remove it, or give "
                "the base."
            )
        return model
    if surgery is None:
        raise InPlaceTTTError(
            "the model is not converted and there is no inplace_ttt.ttt; add it, or give a converted folder."
        )
    if surgery.needs_calibration:
        raise InPlaceTTTError(
            "these settings of inplace_ttt.ttt need measurements on a text; run `inplace-ttt convert MODEL "
            "OUT --calibrate TEXT` with "
            "them, give OUT as the model, and remove inplace_ttt.ttt."
        )
    return convert(model, surgery)

"""The settings of a TTT layer, and the checks that a model's tensors fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from .forward_context import ForwardContext


@dataclass(eq=False)
class LayerSettings:
    """A TTT layer's index and settings.

    Attributes:
        layer: index of the decoder layer.
        config: the layer's config.
        eta: the layer's η.
        observer: called before each read of whole documents, with the layer, its keys, targets and gate, and
            the forward's context.
    """

    layer: int
    config: InPlaceTTTConfig
    eta: float
    observer: Callable[[Any, Tensor, Tensor, Tensor | None, ForwardContext], None] | None = None


def check_split(config: InPlaceTTTConfig) -> None:
    """Checks a layer whose input tensor parallelism splits over h.

    Args:
        config: the layer's config.

    Raises:
        InPlaceTTTError: if the result with the layer's options is not a sum over parts of h.
    """
    if held := config.wanting_whole_input:
        raise InPlaceTTTError(
            f"tensor parallelism splits the down-projection's input, but {' and '.join(held)} would need "
            "all of it; leave that out of the config, or split the model in another way."
        )


def check_width(settings: LayerSettings, source: int, output: int) -> None:
    """Checks that the target source is as wide as the layer's output.

    Args:
        settings: the layer's index and settings.
        source: width of the target source.
        output: width d of the layer's output.

    Raises:
        InPlaceTTTError: if the widths differ.
    """
    if source != output:
        raise InPlaceTTTError(
            f"the target {settings.config.target!r} has width {source}, but layer "
            f"{settings.layer}'s output has {output}, since "
            "this family carries several streams side by side; choose the target 'hidden_states'."
        )

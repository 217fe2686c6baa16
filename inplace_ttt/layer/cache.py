"""Fast-weight streams on the layers of a transformers cache.

transformers already calls reset, crop, reorder, repeat and select on every layer of a cache, so each stream
rides on the cache layer of its decoder layer: the layer object is replaced by one of a subclass that shares
all its attributes.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from .prompt_stream import stream_class
from .stream import FastWeightStream


class CarriesFastWeight:
    """Mixin over a cache layer's own class: whatever happens to the keys and values happens to the fast
    weight."""

    fast_weight: FastWeightStream

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle would look the class up by its name
        return _empty_carrier, (plain_class(self),), self.__dict__

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.fast_weight.reset()

    def crop(self, tokens_to_remove: int) -> None:
        self.fast_weight.check_crop(abs(tokens_to_remove))  # either may refuse, before anything is changed
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self.fast_weight.crop(abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.fast_weight.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.fast_weight.select([row for row in range(self.fast_weight.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.fast_weight.select(torch.arange(self.fast_weight.batch)[indices.cpu()].tolist())


@functools.cache
def _carrier(plain: type) -> type:
    return type(f"FastWeight{plain.__name__}", (CarriesFastWeight, plain), {})


def _empty_carrier(plain: type) -> Any:
    return object.__new__(_carrier(plain))


def attach(cache: Cache, layer: int, stream: FastWeightStream) -> None:
    plain = cache.layers[layer]
    carrier = _empty_carrier(type(plain))
    carrier.__dict__ = plain.__dict__
    carrier.fast_weight = stream
    cache.layers[layer] = carrier


def only_written(cache: Cache, empty: Cache) -> Cache:
    """`empty` with copies of the streams of `cache`: the same fast weights, and nothing to attend to."""
    for layer, stream in copy.deepcopy(streams(cache)).items():
        stream.forget_attention()
        attach(empty, layer, stream)
    return empty


def stream_of(cache: Any, layer: int, batch: int, config: InPlaceTTTConfig) -> FastWeightStream:
    """The stream of a decoder layer in a cache, created at its first use."""
    layers = getattr(cache, "layers", None)
    if layers is None or layer >= len(layers):
        raise InPlaceTTTError(
            f"a {type(cache).__name__} has no layer {layer} to keep the fast weight on; use a transformers "
            "Cache."
        )
    if not layers[layer].is_compileable and layers[layer].get_seq_length() != layers[0].get_seq_length():
        raise InPlaceTTTError(
            "a refused crop has left this cache with layers of different lengths; start a new one, or crop "
            "a fork."
        )
    if not isinstance(layers[layer], CarriesFastWeight):
        attach(cache, layer, stream_class(config).of(config, batch))
    elif layers[layer].fast_weight.batch != batch and layers[layer].fast_weight.is_empty:
        layers[layer].fast_weight = stream_class(config).of(config, batch)
    return layers[layer].fast_weight


def stop_recording(cache: Cache) -> None:
    """Undo `cache.activate_past_recording()`: layers with a window drop what the next forward does not
    see."""
    for layer in cache.layers:
        if getattr(layer, "record_past", False):
            layer.crop(0)
            layer.record_past = False


def plain_class(layer: Any) -> type:
    """The layer's own class, without the fast weight."""
    return type(layer).__mro__[2] if isinstance(layer, CarriesFastWeight) else type(layer)


def skip(cache: Any, layer: int) -> None:
    """Note tokens that went into a cache past its stream."""
    layers = getattr(cache, "layers", [])
    if layer < len(layers) and isinstance(layers[layer], CarriesFastWeight):
        layers[layer].fast_weight.skip()


def streams(cache: Cache) -> dict[int, FastWeightStream]:
    """Decoder layer -> its stream, for the layers of a cache that have one."""
    return {
        i: layer.fast_weight for i, layer in enumerate(cache.layers) if isinstance(layer, CarriesFastWeight)
    }

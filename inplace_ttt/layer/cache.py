"""Fast-weight streams on the layers of a transformers cache.

transformers calls reset, crop, reorder, repeat and select on every layer of a cache. So each stream is an
attribute of the cache layer of its decoder layer, and receives the same calls. For that, the cache layer is
replaced by an object of a subclass, which shares all attributes of the original.
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
    """Mixin for a cache layer's class. It applies every operation on keys and values to the stream too."""

    fast_weight: FastWeightStream
    is_compileable: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle would look the class up by its name
        return _empty_carrier, (plain_class(self),), self.__dict__

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.fast_weight.reset()

    def crop(self, tokens_to_remove: int) -> None:
        # the check and the inherited crop may raise, before the stream is changed
        self.fast_weight.check_crop(abs(tokens_to_remove))
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
    """Puts a stream on the cache layer of decoder layer `layer`."""
    plain = cache.layers[layer]
    carrier = _empty_carrier(type(plain))
    carrier.__dict__ = plain.__dict__
    carrier.fast_weight = stream
    cache.layers[layer] = carrier


def only_written(cache: Cache, empty: Cache) -> Cache:
    """Copies the streams of `cache`, without its KV cache, to `empty`.

    Args:
        cache: a cache with streams.
        empty: a new cache.

    Returns:
        `empty`.
    """
    for layer, stream in copy.deepcopy(streams(cache)).items():
        stream.forget_attention()
        attach(empty, layer, stream)
    return empty


def stream_of(cache: Any, layer: int, batch: int, config: InPlaceTTTConfig) -> FastWeightStream:
    """Returns the stream of a decoder layer in a cache, and creates it at its first use.

    Args:
        cache: the cache of a forward.
        layer: index of the decoder layer.
        batch: rows of the forward. An empty stream for another number of rows is replaced.
        config: the layer's config.

    Raises:
        InPlaceTTTError: if the cache lacks this layer, or its layers differ in length.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or layer >= len(layers):
        raise InPlaceTTTError(
            f"a {type(cache).__name__} lacks layer {layer}, which would store the fast weight; use a "
            "transformers Cache."
        )
    if not layers[layer].is_compileable and layers[layer].get_seq_length() != layers[0].get_seq_length():
        raise InPlaceTTTError(
            "a refused crop has left this cache with layers of different lengths; start a new cache, or crop "
            "a fork."
        )
    if not isinstance(layers[layer], CarriesFastWeight):
        attach(cache, layer, stream_class(config).of(config, batch))
    elif layers[layer].fast_weight.batch != batch and layers[layer].fast_weight.is_empty:
        layers[layer].fast_weight = stream_class(config).of(config, batch)
    return layers[layer].fast_weight


def known_stream(cache: Any, layer: int) -> FastWeightStream | None:
    """Returns the stream of a decoder layer in a static cache, or None if there is none yet."""
    layers = getattr(cache, "layers", ())
    carrier: Any = layers[layer] if layer < len(layers) else None
    return carrier.fast_weight if isinstance(carrier, CarriesFastWeight) and carrier.is_compileable else None


def stop_recording(cache: Cache) -> None:
    """Undoes `cache.activate_past_recording()`.

    Layers with a window drop the keys and values that the next forward does not attend to.
    """
    for layer in cache.layers:
        if getattr(layer, "record_past", False):
            layer.crop(0)
            layer.record_past = False


def plain_class(layer: Any) -> type:
    """Returns the cache layer's class without `CarriesFastWeight`."""
    return type(layer).__mro__[2] if isinstance(layer, CarriesFastWeight) else type(layer)


def skip(cache: Any, layer: int) -> None:
    """Records in a layer's stream that its cache received tokens that the stream did not receive."""
    layers = getattr(cache, "layers", [])
    if layer < len(layers) and isinstance(layers[layer], CarriesFastWeight):
        layers[layer].fast_weight.skip()


def streams(cache: Cache) -> dict[int, FastWeightStream]:
    """Returns the streams of a cache by decoder layer."""
    return {
        i: layer.fast_weight for i, layer in enumerate(cache.layers) if isinstance(layer, CarriesFastWeight)
    }

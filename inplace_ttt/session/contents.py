"""Conversion between a session's cache and the tensors of a session file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import InPlaceTTTError
from ..layer.cache import CarriesFastWeight, attach, plain_class, streams
from ..layer.prompt_stream import stream_class
from ..surgery import config_of, fast_weights
from .file import Header, KeptAttention


def contents_of(cache: Cache) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of a cache by name, and the fields of `KeptAttention` per layer with a KV cache.

    Raises:
        InPlaceTTTError: if the cache's class cannot be saved, or its prompt is read but not yet written
            (`prompt_write`).
    """
    tensors: dict[str, Tensor] = {}
    attention: dict[str, Any] = {}
    again = max((stream.asks_again for stream in streams(cache).values()), default=0)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CarriesFastWeight):
            held = layer.fast_weight.tensors()
            tensors |= {f"{index}.fast.{name}": tensor for name, tensor in held.items()}
        if getattr(layer, "is_initialized", False) and layer.get_seq_length() > 0:
            if plain_class(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise InPlaceTTTError(
                    f"a {plain_class(layer).__name__} cannot be saved; use a DynamicCache, or save "
                    "session.drop_kv_cache()."
                )
            window = getattr(layer, "sliding_window", None)
            # a layer whose `record_past` is set holds more tokens than its window
            kept = slice(None) if window is None else slice(-window + 1 - again, None)
            tensors |= {
                f"{index}.keys": layer.keys[:, :, kept],
                f"{index}.values": layer.values[:, :, kept],
            }
            attention[str(index)] = dataclasses.asdict(KeptAttention(layer.get_seq_length(), window))
    return tensors, attention


def fill(cache: Cache, model: PreTrainedModel, header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Fills an empty cache with the checked tensors of a session file.

    Args:
        cache: new cache of the model.
        model: the converted model.
        header: header of the file.
        tensors: tensors of the file.
    """
    for name, saved in header.attention.items():
        index = int(name)
        layer = DynamicLayer() if saved.window is None else DynamicSlidingWindowLayer(saved.window)
        cache.layers[index] = layer
        keys, values = (
            tensors[f"{index}.{name}"].to(model.device, model.dtype) for name in ("keys", "values")
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if saved.window is not None:
            layer.cumulative_length = saved.length
            layer.record_past = keys.shape[2] >= saved.window
    config = config_of(model)
    for index in fast_weights(model):
        prefix = f"{index}.fast."
        held = {
            name.removeprefix(prefix): tensor.to(model.device)
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        if held:
            attach(cache, index, stream_class(config).restore(held, config, model.dtype))

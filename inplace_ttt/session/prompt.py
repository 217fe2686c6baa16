"""Writes the prompt that a cache has read."""

from __future__ import annotations

from transformers import Cache, PreTrainedModel

from ..layer.cache import stop_recording, streams
from ..layer.prompt_stream import PromptStream
from ..surgery import fast_weights


def write_prompt(model: PreTrainedModel, cache: Cache) -> None:
    """Writes the prompt that a cache has read, and drops the prompt's last token from the cache.

    The next forward reads that token again, with the written weights.

    Args:
        model: converted model with `prompt_write`.
        cache: the cache that has read the prompt. `cache.activate_past_recording()` must have been called
            before it read the last token.
    """
    layers = fast_weights(model)
    for index, stream in streams(cache).items():
        assert isinstance(stream, PromptStream)
        stream.write(layers[index])
    cache.crop(-1)
    stop_recording(cache)

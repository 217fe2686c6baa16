"""Adds the writes of one session's cache to another's."""

from __future__ import annotations

from transformers import Cache

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..layer.cache import stream_of, streams


def add_writes(cache: Cache, other: Cache, config: InPlaceTTTConfig) -> None:
    """Adds the states in `other` to those in `cache`, row by row, in place.

    Args:
        cache: a cache without keys and values.
        other: a cache of the same model.
        config: the model's config.

    Raises:
        InPlaceTTTError: if the config has `prompt_write`, or the caches hold different numbers of sequences.
    """
    if config.prompt_write is not None:
        raise InPlaceTTTError(
            "with prompt_write a session holds one write of one prompt, and two such writes cannot be added; "
            "read the texts in one session."
        )
    for index, stream in streams(other).items():
        stream.check_holds_state()
        held = stream_of(cache, index, stream.batch, config)
        if held.batch != stream.batch:
            raise InPlaceTTTError(
                f"sessions of {held.batch} and {stream.batch} sequences cannot be merged; merge sessions "
                "with the same number of sequences."
            )
        held.add_writes(stream)

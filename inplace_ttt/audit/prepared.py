"""A converted model prepared for readings, and the inputs of the readings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import InPlaceTTTConfig
from ..families import locate
from ..layer.fast_linear import FastWeight
from ..layer.overrides import with_config
from ..surgery import fast_weights


class Prepared:
    """A converted model with short chunks, writes of visible size, and a clip that acts on half of them.

    Without a declared clip, no clip is set. With `training`, the declared rules are those of training mode.
    """

    def __init__(self, lm: Any, config: InPlaceTTTConfig, seed: int, training: bool = False) -> None:
        self.lm, self.config, self.seed, self.training = lm, config, seed, training
        self.layers: dict[int, FastWeight] = fast_weights(lm)
        self.chunk = config.chunk_size

    def clipping_half(self, declared: InPlaceTTTConfig, norms: list[float]) -> AbstractContextManager[Self]:
        """Returns a context in which the declared clip, if there is one, acts on half of the deltas.

        Args:
            declared: the model's own config.
            norms: norms of the deltas, divided by ‖W0‖ if the clip is relative.
        """
        clip = declared.clip and dataclasses.replace(declared.clip, max_norm=median(norms))
        return self._with(clip=clip)

    def with_larger_chunks(self) -> AbstractContextManager[Self]:
        """Returns a context with the same model and larger chunks of an odd length."""
        return self.with_chunks_of(2 * self.chunk + 5)

    def with_chunks_of(self, chunk: int) -> AbstractContextManager[Self]:
        return self._with(chunk_size=chunk)

    @contextmanager
    def _with(self, **changes: Any) -> Iterator[Self]:
        with with_config(self.layers.values(), **changes):
            yield type(self)(self.lm, dataclasses.replace(self.config, **changes), self.seed, self.training)

    def ids(self, rows: int, tokens: int, part: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1000 * part)
        ids = torch.randint(self.lm.config.get_text_config().vocab_size, (rows, tokens), generator=generator)
        return ids.to(self.lm.get_input_embeddings().weight.device)

    @property
    def takes_documents(self) -> bool:
        """True if the model accepts position_ids, which mark where documents begin.

        Other models read a row as one document.
        """
        return "position_ids" in inspect.signature(locate(self.lm).base.forward).parameters

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.lm.config.get_text_config())

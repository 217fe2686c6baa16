"""A converted model prepared for readings, and the yardstick that its readings are compared with."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from statistics import median
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from ..config import InPlaceTTTConfig
from ..errors import InPlaceTTTError
from ..families import CACHE, locate
from ..layer.fast_linear import FastWeight
from ..layer.overrides import with_config
from ..session.session import Session
from ..surgery import config_of, fast_weights
from .borrowing import probe_chunk, small_chunks
from .recording import Documents, Record

Reading = tuple[str, Any, Documents]
"""The name of a reading, its `Record`, and the documents in it."""
Scene = Callable[[Any], Iterator[Reading]]
"""Runs a `Prepared` model and yields readings."""


class Prepared(ABC):
    """A converted model with short chunks, writes of visible size, and a clip that acts on half of them.

    Without a declared clip, no clip is set. With `training`, the declared rules are those of training mode.

    Attributes:
        by_layers: True if the outputs of each TTT layer are compared, False if the logits are.
        differs: a clause about a deviation, with the fields `layer` and `error`.
    """

    by_layers: ClassVar[bool]
    differs: ClassVar[str]

    def __init__(self, lm: Any, config: InPlaceTTTConfig, seed: int, training: bool = False) -> None:
        self.lm, self.config, self.seed, self.training = lm, config, seed, training
        self.layers: dict[int, FastWeight] = fast_weights(lm)
        self.chunk = config.chunk_size

    @classmethod
    @contextmanager
    def of(cls, lm: Any, seed: int) -> Iterator[Self]:
        """Yields the prepared model, and restores it on exit.

        Args:
            lm: a converted model.
            seed: seed of the token ids and the target generator.
        """
        declared = config_of(lm)
        chunk = probe_chunk(declared.kernel_size)
        with small_chunks(lm, chunk, seed), torch.no_grad():
            probed = cls(
                lm, dataclasses.replace(declared, chunk_size=chunk, clip=None, prompt_write=None), seed
            )
            norms = probed.strengthen(declared.clip is not None and declared.clip.relative)
            clip = declared.clip and dataclasses.replace(declared.clip, max_norm=median(norms))
            with probed._with(clip=clip) as clipped:
                yield clipped

    def with_chunks_of(self, chunk: int) -> AbstractContextManager[Self]:
        """Returns a context with the same model and other chunks."""
        return self._with(chunk_size=chunk)

    def without_updates(self) -> AbstractContextManager[Self]:
        """Returns a context in which generated tokens are not written."""
        return self._with(update_on_decode=False)

    @contextmanager
    def _with(self, **changes: Any) -> Iterator[Self]:
        with with_config(self.layers.values(), **changes):
            yield type(self)(self.lm, dataclasses.replace(self.config, **changes), self.seed, self.training)

    @abstractmethod
    def strengthen(self, relative: bool) -> list[float]:
        """Scales the targets so that reads have a visible size, and returns norms of the chunks' deltas.

        With `relative`, the norms are divided by ‖W0‖.
        """

    @abstractmethod
    def recording(self) -> AbstractContextManager[Record]:
        """Returns a context that records the forwards inside it."""

    @abstractmethod
    def errors(self, record: Any, documents: Documents) -> dict[int, float]:
        """Returns the errors of a reading by layer; empty if the reading cannot be compared."""

    @staticmethod
    @abstractmethod
    def limit(dtype: torch.dtype) -> float:
        """Returns the smallest error that deviates."""

    def deviations(self, scene: Scene) -> dict[str, dict[int, float]]:
        """Returns the errors of each reading by its name, then by layer."""
        found = {name: self.errors(record, documents) for name, record, documents in scene(self)}
        return {name: errors for name, errors in found.items() if errors}

    @cached_property
    def _fewest_logits(self) -> dict[str, int]:
        """The argument that makes the model compute the last token's logits alone, if no more are used."""
        takes_it = "logits_to_keep" in inspect.signature(self.lm.forward).parameters
        return {"logits_to_keep": 1} if takes_it and self.by_layers else {}

    def forward(self, ids: Tensor, **kwargs: Any) -> Any:
        return self.lm(input_ids=ids, **self._fewest_logits, **kwargs)

    def read_on(self, session: Session, ids: Tensor) -> None:
        """Reads ids into a session's cache, with the logits of all tokens if they are compared."""
        self.forward(ids, **{CACHE: session.cache}, use_cache=True)

    def read(self, ids: Tensor, **kwargs: Any) -> Any:
        """Returns the record of one forward."""
        with self.recording() as record:
            self.forward(ids, **{"use_cache": False, **kwargs})
        return record

    def ids(self, rows: int, tokens: int, part: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1000 * part)
        ids = torch.randint(self.lm.config.get_text_config().vocab_size, (rows, tokens), generator=generator)
        return ids.to(self.lm.get_input_embeddings().weight.device)

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.lm.config.get_text_config())

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(locate(self.lm).base.forward).parameters

    @property
    def takes_documents(self) -> bool:
        """True if a row may hold several documents, which position_ids mark.

        With several steps per chunk, a row is one document.
        """
        return self.takes_positions and self.config.steps_per_chunk == 1

    @cached_property
    def takes_padding(self) -> bool:
        """True if the model accepts padded rows. Models with an attention window refuse them."""
        ids = self.ids(2, 2)
        try:
            self.read(ids, attention_mask=torch.tensor([[0, 1], [1, 1]], device=ids.device))
        except InPlaceTTTError:
            return False
        return True

"""The inputs and the result of building a run's data, and the steps that all ways of building share."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...files.text import KNOWN_IDS, begins_of
from ...texts.sources import Source, find
from ..recipe.data_section import Data
from ..recipe.recipe import Recipe
from .mixture import Given, describe
from .packing import Size, count
from .report import DataReport
from .streams import RowStream

if TYPE_CHECKING:
    from datasets import Dataset, Features


@dataclass(frozen=True)
class TrainingData:
    """The rows of a run and the documents behind them.

    A row holds `input_ids`, `position_ids` and `labels`, each a list of `sequence_length` integers.

    Attributes:
        train: rows to train on. With `data.streaming` they are a stream, which yields the same order each
            time.
        validation: held-out rows; None if nothing is held out.
        report: counts and warnings about the data.
        documents: returns an iterator over the token ids of the training documents, in the order of packing.
        align: each document starts on a multiple of this many tokens in its row.
        begins: token ids of the special tokens that begin every text. If a document
            begins with them, so does each of its pieces.
    """

    train: Dataset | RowStream
    validation: Dataset | None
    report: DataReport
    documents: Callable[[], Iterator[Sequence[int]]]
    align: int = 1
    begins: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """The inputs of every step of building the data."""

    recipe: Recipe
    tokenizer: Any
    chunk_size: int

    @property
    def align(self) -> int:
        return self.chunk_size if self.recipe.parallel.sequence_parallel_size > 1 else 1

    @property
    def pad_token(self) -> int:
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        return tuple(begins_of(self.tokenizer))

    @functools.cached_property
    def tokenizer_key(self) -> str:
        """A key that differs for tokenizers that encode a text differently."""
        t = self.tokenizer
        backend = getattr(t, "backend_tokenizer", None)
        inner: Any = sorted(t.get_vocab().items())
        if backend is not None:
            inner = {
                key: value
                for key, value in json.loads(backend.to_str()).items()
                if key not in ("truncation", "padding")
            }
        return key_of(
            type(t).__name__,
            inner,
            t.eos_token_id,
            t.bos_token_id,
            getattr(t, "add_bos_token", None),
            getattr(t, KNOWN_IDS, None),
        )


def sources_of(data: Data, role: str) -> list[Source]:
    """Returns the sources that `data.train` or `data.validation` (the role) names."""
    return [find(name, data.reading, f"data.{role}") for name in getattr(data, role)]


def mixture_of(
    sources: Sequence[Source], data: Data, lengths: Iterable[int], of_source: Iterable[int]
) -> list[dict[str, Any]]:
    """Returns the report's entry of each source, from the documents' lengths and source numbers."""
    import numpy as np

    sizes, numbers = np.fromiter(lengths, np.int64), np.fromiter(of_source, np.int64)
    given = [Given(int((numbers == n).sum()), int(sizes[numbers == n].sum())) for n in range(len(sources))]
    return describe(sources, data.weights, given)


def held_out_sizes(sizes: list[Size], job: Job) -> dict[str, int] | None:
    """Returns the report's counts of validation; None if nothing is held out."""
    counts = count(sizes, job.recipe.data.sequence_length, job.chunk_size, job.align)
    return {"documents": len(sizes), "tokens": counts.tokens, "rows": counts.rows} if sizes else None


def count_unbegun(leads: Iterable[int], job: Job) -> int:
    """Returns the number of documents that lack the special tokens that begin every text."""
    return sum(lead == 0 for lead in leads) if job.begins else 0


def key_of(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def row_features() -> Features:
    from datasets import Features, List, Value

    return Features({name: List(Value("int32")) for name in ("input_ids", "position_ids", "labels")})

"""What a recipe says of its data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ...files.schema import at_least, at_most, require
from ...texts.sources import Reading

MOST = 2**31 - 1
"""Of any number that sizes something."""
_MOST_TOKENS = 2**24
"""Of a row."""
_MOST_STATEMENTS = 1000
"""Of a row, each with a name or two; `tasks.facts` has some 3,300."""


@dataclass(frozen=True)
class Recall:
    """The synthetic recall task instead of text: key-value pairs, asked for again beyond the attention
    window."""

    pairs: int = 16
    vocabulary: int = 128
    rows: int = 4096

    def __post_init__(self) -> None:
        at_least(1, self, "pairs", "vocabulary", "rows")
        at_most(MOST, self, "pairs", "vocabulary", "rows")


@dataclass(frozen=True)
class RepeatedPassages:
    """Passages that stand twice: in a `fraction` of the rows, `length` tokens come again `gap` tokens later
    in their document."""

    fraction: float = 0.5
    length: int = 512
    gap: int = 1024

    def __post_init__(self) -> None:
        require(0 < self.fraction <= 1, "fraction", "must be above 0 and at most 1")
        at_least(1, self, "length")
        at_least(0, self, "gap")


@dataclass(frozen=True)
class SyntheticFacts:
    """Invented facts in text: in a `fraction` of the rows `count` statements are told, and again after
    `min_gap` tokens of text or more.

    loss_on_other_tokens: such rows have a loss on the answers of the second time, and on this fraction of all
        other tokens.
    """

    fraction: float = 0.5
    count: int = 16
    min_gap: int = 256
    loss_on_other_tokens: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.fraction <= 1, "fraction", "must be above 0 and at most 1")
        require(0 <= self.loss_on_other_tokens <= 1, "loss_on_other_tokens", "must be from 0 to 1")
        at_least(1, self, "count")
        at_most(_MOST_STATEMENTS, self, "count")
        at_least(0, self, "min_gap")


@dataclass(frozen=True)
class Data:
    """Documents, and how they become rows; or the synthetic `recall` task.

    train, validation: files, folders, glob patterns or hub names (owner/name:config@split). A text file is
        one document.
    weights: of the tokens, what share each entry of `train` is to have; without, every document is read once
        a pass.
    validation_documents: documents held out of `train` where `validation` is empty, chosen by `seed`; rows of
        `recall`.
    format: of the files; "auto" goes by the ending. text_field: where a record keeps its text; without,
        "text", or
    the tokens in "input_ids" where it has them.
    repeated_passages, synthetic_facts: training rows in which a passage comes again, or facts are told and
        said again, beyond the attention
    window. Such rows teach the fast weights to recall.
    sequence_length: tokens a row. streaming: read while training instead of tokenising once into `cache`.
    """

    train: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    validation_documents: int = 0
    format: Literal["auto", "text", "json", "parquet", "arrow", "hub"] = "auto"
    text_field: str | None = None
    split: str = "train"
    sequence_length: int = 32768
    streaming: bool = False
    shuffle: bool = True
    seed: int = 0
    cache: str | None = None
    processes: int | None = None
    recall: Recall | None = None
    repeated_passages: RepeatedPassages | None = None
    synthetic_facts: SyntheticFacts | None = None

    def __post_init__(self) -> None:
        for name in ("repeated_passages", "synthetic_facts", "validation", "streaming"):
            require(not getattr(self, name) or self.recall is None, name, "has no effect on recall")
        rows = sum(
            practice.fraction
            for practice in (self.repeated_passages, self.synthetic_facts)
            if practice is not None
        )
        require(
            rows <= 1,
            "synthetic_facts",
            f"and repeated_passages are {rows:g} of the rows together, which must be at most 1",
        )
        if self.repeated_passages is not None:
            least = 2 * self.repeated_passages.length + self.repeated_passages.gap
            require(
                least <= self.sequence_length,
                "repeated_passages",
                f"takes {least} tokens, sequence_length is {self.sequence_length}",
            )
        require(
            bool(self.train) or self.recall is not None,
            "train",
            "name at least one file, folder, pattern or hub dataset",
        )
        require(not (self.train and self.recall), "recall", "has no effect beside train")
        if self.weights:
            named, given = len(self.train), len(self.weights)
            require(named > 1, "weights", "has no effect on fewer than two entries of train")
            require(
                given == named,
                "weights",
                f"must be one for each entry of train: {given} given, {named} entries",
            )
            require(
                all(0 < weight < math.inf for weight in self.weights),
                "weights",
                "must all be above 0 and finite",
            )
        at_least(1, self, "processes")
        at_most(1024, self, "processes")
        require(self.processes is None or not self.streaming, "processes", "has no effect on streaming")
        at_least(2, self, "sequence_length")
        at_most(_MOST_TOKENS, self, "sequence_length")
        at_least(0, self, "validation_documents", "seed")
        at_most(2**32 - 1, self, "seed")
        require(
            not (self.validation and self.validation_documents),
            "validation_documents",
            "has no effect beside validation",
        )

    @property
    def reading(self) -> Reading:
        """How the sources' records are read."""
        return Reading(self.format, self.text_field, self.split, self.cache, "data.text_field", "data.format")

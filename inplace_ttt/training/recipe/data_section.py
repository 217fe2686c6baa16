"""The section `data` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ...files.schema import at_least, at_most, require
from ...tasks.facts import KINDS
from ...texts.sources import Reading

MOST = 2**31 - 1
"""Upper bound on any number that sets a size."""
_MOST_TOKENS = 2**24
"""Upper bound on the tokens of a row."""
_MOST_QUESTIONS = 1000
"""Upper bound on the questions of a row. Each takes at most three of some 3,300 names in `tasks.facts`."""


@dataclass(frozen=True)
class Recall:
    """The synthetic recall task, in place of text: key-value pairs, and queries beyond the attention window.

    Attributes:
        pairs: key-value pairs per row.
        vocabulary: number of token ids.
        rows: training rows.
    """

    pairs: int = 16
    vocabulary: int = 128
    rows: int = 4096

    def __post_init__(self) -> None:
        at_least(1, self, "pairs", "vocabulary", "rows")
        at_most(MOST, self, "pairs", "vocabulary", "rows")


@dataclass(frozen=True)
class RepeatedPassages:
    """Repeated passages in training rows.

    Attributes:
        fraction: fraction of the rows with a repeated passage.
        length: tokens of the passage.
        gap: tokens between the passage and its copy, in the same document.
    """

    fraction: float = 0.5
    length: int = 512
    gap: int = 1024

    def __post_init__(self) -> None:
        require(0 < self.fraction <= 1, "fraction", "must be above 0 and at most 1")
        at_least(1, self, "length")
        at_least(0, self, "gap")


@dataclass(frozen=True)
class FactKinds:
    """Kinds of questions about invented facts. Each number is the kind's share of the sum of all.

    Attributes:
        verbatim: repeats the statement.
        paraphrased: asks in another wording than the statement.
        reversed: gives the value and asks for the subject.
        two_hops: needs two statements. The answer of one is the subject of the other.
        changed: asks for a fact that is stated twice with different values. The later value is the answer.
        never_told: asks for a fact that the row does not state. The answer is always `not stated`.
    """

    verbatim: float = 0.2
    paraphrased: float = 0.5
    reversed: float = 0.1
    two_hops: float = 0.05
    changed: float = 0.1
    never_told: float = 0.05

    def __post_init__(self) -> None:
        at_least(0, self, *(kind.replace(" ", "_") for kind in KINDS))
        require(sum(self.shares.values()) > 0, "verbatim", "at least one kind must have a share above 0")

    @property
    def shares(self) -> dict[str, float]:
        """The shares by kind, as `tasks.facts` names them."""
        return {kind: getattr(self, kind.replace(" ", "_")) for kind in KINDS}


@dataclass(frozen=True)
class SyntheticFacts:
    """Invented facts in training rows, each stated and later asked for.

    Attributes:
        fraction: fraction of the rows with facts.
        count: questions per row, at most 1,000.
        min_gap: smallest number of tokens of text between the last statement and the first question.
        loss_on_other_tokens: fraction of the other tokens in such rows that keep their loss. The answers of
            the questions always keep it.
        kinds: kinds of questions, in many wordings. A kind that the table leaves out has its default share.
            None repeats each statement, in one wording per relation.
    """

    fraction: float = 0.5
    count: int = 16
    min_gap: int = 256
    loss_on_other_tokens: float = 1.0
    kinds: FactKinds | None = None

    def __post_init__(self) -> None:
        require(0 < self.fraction <= 1, "fraction", "must be above 0 and at most 1")
        require(0 <= self.loss_on_other_tokens <= 1, "loss_on_other_tokens", "must be from 0 to 1")
        at_least(1, self, "count")
        at_most(_MOST_QUESTIONS, self, "count")
        at_least(0, self, "min_gap")


@dataclass(frozen=True)
class Data:
    """Documents and their packing into rows, or the synthetic `recall` task.

    Attributes:
        train: files, folders, glob patterns or hub names (owner/name:config@split). A text file is one
            document.
        weights: share of the tokens for each entry of `train`. Without weights, every document is read once
            per pass.
        validation: held-out documents, given like `train`.
        validation_documents: in place of `validation`, the number of documents to hold out of `train`. With
            `recall`, the number of held-out rows.
        format: format of the files; `auto` goes by each file's ending. Files may be compressed (`.gz`,
            `.bz2`, `.xz`, `.zst`).
        text_field: field of a record that holds its text. Other fields may be missing or change their type.
            None takes `input_ids`, `text` or `messages`, the first that a record has.
        split: split of a dataset, unless its name gives one.
        sequence_length: tokens per row.
        streaming: read while training, in place of tokenizing once into `cache`.
        shuffle: shuffle the documents.
        seed: seed of every random choice about the data.
        cache: folder for tokens and rows; None for that of `datasets`.
        processes: processes that tokenize, without `streaming`. None takes one for every 32 MB, at most all
            cores.
        recall: the recall task, in place of documents.
        repeated_passages: repeat passages in training rows, beyond the attention window. Such rows teach the
            fast weights to recall.
        synthetic_facts: state invented facts in training rows and ask for them later, for the same purpose.
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
            require(not getattr(self, name) or self.recall is None, name, "does nothing with recall")
        rows = sum(
            practice.fraction
            for practice in (self.repeated_passages, self.synthetic_facts)
            if practice is not None
        )
        require(
            rows <= 1,
            "synthetic_facts",
            f"its fraction and that of repeated_passages add up to {rows:g}, which must be at most 1",
        )
        if self.repeated_passages is not None:
            least = 2 * self.repeated_passages.length + self.repeated_passages.gap
            require(
                least <= self.sequence_length,
                "repeated_passages",
                f"takes {least} tokens, but sequence_length is {self.sequence_length}",
            )
        require(
            bool(self.train) or self.recall is not None,
            "train",
            "name at least one file, folder, pattern or hub dataset",
        )
        require(not (self.train and self.recall), "recall", "does nothing beside train")
        if self.weights:
            named, given = len(self.train), len(self.weights)
            require(named > 1, "weights", "does nothing with fewer than two entries of train")
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
        require(self.processes is None or not self.streaming, "processes", "does nothing with streaming")
        at_least(2, self, "sequence_length")
        at_most(_MOST_TOKENS, self, "sequence_length")
        at_least(0, self, "validation_documents", "seed")
        at_most(2**32 - 1, self, "seed")
        require(
            not (self.validation and self.validation_documents),
            "validation_documents",
            "does nothing beside validation",
        )

    @property
    def reading(self) -> Reading:
        """The settings with which the sources' records are read."""
        return Reading(self.format, self.text_field, self.split, self.cache, "data.text_field", "data.format")

"""Counts the data of a run, and refuses data that cannot train conv and P."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InPlaceTTTError
from ...texts.sources import Source
from ..recipe.recipe import Recipe
from .packing import PackingCounts

FEW_LONG = 0.5
MUCH_PADDING = 0.25


@dataclass(frozen=True)
class DataReport:
    """Counts of a run's data. All but `validation` are about the rows to train on.

    Attributes:
        documents: number of documents.
        empty_documents: number of empty documents, which are left out.
        repeated: number of training documents that are left out because validation holds them too.
        tokens: tokens of documents, without padding.
        rows: number of packed rows.
        sequence_length: tokens per row.
        chunk_size: tokens per chunk.
        padding: tokens of padding.
        padding_share: padding as a fraction of all tokens in the rows.
        pieces: number of pieces of documents in rows.
        long_tokens: tokens in pieces longer than one chunk. Only these train the target generator.
        long_share: `long_tokens` as a fraction of `tokens`.
        writes: chunks whose write is read by a later token of the same piece.
        chunks_per_piece: minimum, median and maximum.
        sha256: hash of the token ids, with the documents in the order of their sources.
        sources: the sources of training and validation.
        mixture: for each training source its documents, tokens, share of the tokens, and the share that
            `data.weights` set.
        validation: documents, tokens and rows of validation; None if nothing is held out.
        sampled: True if the counts cover only the start of a stream.
        warnings: one sentence per problem.
    """

    documents: int
    empty_documents: int
    repeated: int
    tokens: int
    rows: int
    sequence_length: int
    chunk_size: int
    padding: int
    padding_share: float
    pieces: int
    long_tokens: int
    long_share: float
    writes: int
    chunks_per_piece: dict[str, int]
    sha256: str
    sources: list[dict[str, Any]]
    mixture: list[dict[str, Any]]
    validation: dict[str, int] | None
    sampled: bool
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Tally:
    """Counts of documents before packing. `unbegun` ones lack the special tokens that begin every text."""

    documents: int
    empty: int = 0
    unbegun: int = 0
    repeated: int = 0
    sha256: str = ""
    sampled: bool = False
    mixture: list[dict[str, Any]] = field(default_factory=list)


def make_report(
    recipe: Recipe,
    counts: PackingCounts,
    tally: Tally,
    sources: Sequence[Source],
    validation: dict[str, int] | None,
) -> DataReport:
    """Returns the report.

    Args:
        recipe: the run's recipe.
        counts: counts of the packed rows.
        tally: counts of the documents.
        sources: the sources of training and validation.
        validation: documents, tokens and rows of validation; None if nothing is held out.

    Raises:
        InPlaceTTTError: if the rows hold no tokens, or no piece longer than one chunk. Then nothing trains
            conv and P.
    """
    length, chunk = recipe.data.sequence_length, counts.chunk_size
    where = ", ".join(source.name for source in sources) or "the recall task"
    if not counts.tokens:
        raise InPlaceTTTError(
            f"{where} leaves no document to train on ({tally.empty} empty, {tally.repeated} held out for "
            "validation)."
        )
    longest = max(counts.chunks)
    if not counts.long_tokens:
        raise InPlaceTTTError(
            f"no document is longer than one chunk of {chunk} tokens in rows of {length} ({counts.pieces} "
            "pieces of documents, "
            f"{counts.tokens / counts.pieces:.0f} tokens each on average), so nothing would train "
            "conv and P; lower chunk_size, or use longer documents and data.sequence_length."
        )
    space = counts.rows * length
    padding, long_share = space - counts.tokens, counts.long_tokens / counts.tokens
    warnings = []
    if long_share < FEW_LONG:
        warnings.append(
            f"only {long_share:.0%} of the tokens are in pieces longer than one chunk of {chunk}; the "
            "other tokens do not train "
            "conv and P: lower chunk_size or use longer documents"
        )
    if padding / space > MUCH_PADDING:
        warnings.append(
            f"{padding / space:.0%} of the rows is padding: use longer documents, or lower "
            "sequence_length or chunk_size"
        )
    if counts.rows < recipe.rows_per_step and not tally.sampled:
        warnings.append(
            f"one step reads {recipe.rows_per_step} rows, but there are {counts.rows}: rows repeat within "
            "a step"
        )
    if tally.repeated:
        warnings.append(
            f"{tally.repeated} training documents are in validation too and were left out of training"
        )
    if tally.unbegun:
        warnings.append(
            f"{tally.unbegun} of {tally.documents} documents do not begin with the special tokens that the "
            "tokenizer puts before every "
            "text: a model that was trained with them reads much worse without them; add them to each"
        )
    if tally.empty:
        warnings.append(f"{tally.empty} documents are empty")
    return DataReport(
        documents=tally.documents,
        empty_documents=tally.empty,
        repeated=tally.repeated,
        tokens=counts.tokens,
        rows=counts.rows,
        sequence_length=length,
        chunk_size=chunk,
        padding=padding,
        padding_share=padding / space,
        pieces=counts.pieces,
        long_tokens=counts.long_tokens,
        long_share=long_share,
        writes=counts.writes,
        chunks_per_piece={"min": min(counts.chunks), "median": counts.median_chunks, "max": longest},
        sha256=tally.sha256,
        sources=[source.describe() for source in sources],
        mixture=tally.mixture,
        validation=validation,
        sampled=tally.sampled,
        warnings=warnings,
    )

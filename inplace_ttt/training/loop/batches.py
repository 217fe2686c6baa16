"""Batches of rows: collation, document lengths for flash attention, and held-out rows spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...documents import document_starts
from ...tasks import IGNORED
from ..recipe.recipe import Recipe


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stacks rows into a batch of input_ids, position_ids and labels, int64 [B, T].

    No attention mask is needed, since position_ids show the documents.
    """
    return {
        name: torch.stack([torch.as_tensor(row[name], dtype=torch.int64) for row in rows])
        for name in ("input_ids", "position_ids", "labels")
    }


def with_document_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns a batch of packed rows [B, T] as one row [1, B·T] with the documents' lengths.

    Flash attention needs these lengths. Without them, transformers searches every layer's positions for
    documents, and waits for the device each time. In a batch of several rows it does not search, so documents
    would see each other. A document's first label is ignored, so the last token of a row never predicts the
    next row's first.

    Args:
        batch: position_ids [B, T] and other tensors of that shape.
    """
    flat = {
        name: value.reshape(1, -1) if isinstance(value, Tensor) else value for name, value in batch.items()
    }
    positions = flat["position_ids"]
    starts = document_starts(positions)[0].nonzero()[:, 0]
    ends = torch.cat([starts, starts.new_tensor([positions.shape[1]])]).to(torch.int32)
    longest = int(ends.diff().max())
    return {
        **flat,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def needs_document_lengths(recipe: Recipe) -> bool:
    """Returns True if flash attention must be given the documents' lengths.

    It is False if ranks share rows: Ulysses then gives attention whole rows, whose positions show the
    documents.
    """
    return (
        recipe.model.attn_implementation == "flash_attention_2"
        and recipe.parallel.sequence_parallel_size == 1
    )


def shifted(labels: Tensor) -> Tensor:
    """Returns the target of each token, int64 [B, T]: the next label."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def where_learned(batch: dict[str, Any]) -> dict[str, Any]:
    """Restricts the logits of a batch to positions at which some row has a target.

    Rows may ignore most of their targets, for example if only answers are learned. The head then computes
    only a small part of the logits. With a large vocabulary, logits are most of a small model's work. The
    first position always stays, so that there is at least one.

    Args:
        batch: labels or shift_labels [B, T].

    Returns:
        Arguments of a causal language model, with labels [B, n] and logits_to_keep [n].
    """
    targets = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
    learned = targets.ne(IGNORED).any(0)
    learned[0] = True
    positions = learned.nonzero()[:, 0]
    return {
        **batch,
        "labels": targets[:, positions],
        "shift_labels": targets[:, positions],
        "logits_to_keep": positions,
    }


def held_out_batches(rows: Any, recipe: Recipe, rank: int) -> Iterator[dict[str, Tensor]]:
    """Yields this rank's batches of all rows: input_ids, position_ids and shift_labels, int64 [B, T].

    If P ranks share rows, each gets its part [B, T/P]. ZeRO-3 and shared rows need equal numbers of batches
    on all ranks, so some rows are read twice; the second time their targets are ignored.

    Args:
        rows: the held-out rows.
        recipe: the run's recipe.
        rank: rank of this process.
    """
    shared, size = recipe.parallel.sequence_parallel_size, recipe.training.batch_size
    readers, reader = recipe.parallel.world // shared, rank // shared
    for first in range(0, len(rows), readers * size):
        numbers = range(first + reader * size, first + (reader + 1) * size)
        batch = collate([rows[number % len(rows)] for number in numbers])
        batch["labels"][[number >= len(rows) for number in numbers]] = IGNORED
        batch["shift_labels"] = shifted(batch.pop("labels"))
        yield {name: value.chunk(shared, dim=1)[rank % shared] for name, value in batch.items()}

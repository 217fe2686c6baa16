"""Rows as batches: collated, with their documents' lengths where attention needs them, and held-out rows
spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...layout import document_starts
from ...tasks import IGNORED
from ..recipe.recipe import Recipe


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows to a batch [B, T]; no attention mask, since position_ids show the documents."""
    return {
        name: torch.stack([torch.as_tensor(row[name], dtype=torch.int64) for row in rows])
        for name in ("input_ids", "position_ids", "labels")
    }


def with_document_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of packed rows [B, T] as one row [1, B·T] with its documents' lengths, as flash attention takes
    them.

    Without lengths, transformers looks for documents in every layer anew, each time waiting for the device,
    and in a batch of several rows not at all: their documents would see each other. A document's first label
    is ignored, so no row's last token predicts the next row's first.
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
    """Ranks that share rows have parts of documents; Ulysses hands attention whole rows, whose positions then
    show them."""
    return (
        recipe.model.attn_implementation == "flash_attention_2"
        and recipe.parallel.sequence_parallel_size == 1
    )


def shifted(labels: Tensor) -> Tensor:
    """What each token [B, T] is to predict."""
    return pad(labels[:, 1:], (0, 1), value=IGNORED)


def where_learnt(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose n logits a row stand only where some row [B, T] has a target: the arguments of a causal
    language model.

    Of rows that mostly ignore their targets (answers alone, told facts) the head then computes a small part;
    over a large vocabulary it is most of a small model. The first position stays, so that there is one.
    """
    targets = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
    learnt = targets.ne(IGNORED).any(0)
    learnt[0] = True
    positions = learnt.nonzero()[:, 0]
    return {
        **batch,
        "labels": targets[:, positions],
        "shift_labels": targets[:, positions],
        "logits_to_keep": positions,
    }


def held_out_batches(rows: Any, recipe: Recipe, rank: int) -> Iterator[dict[str, Tensor]]:
    """This rank's batches of all `rows`: input_ids, position_ids and shift_labels [B, T], or a part [B, T/P]
    of rows that P ranks share.

    Every rank gets as many, which ZeRO-3 and ranks that share rows need; what is too much is read again and
    not counted.
    """
    shared, size = recipe.parallel.sequence_parallel_size, recipe.training.batch_size
    readers, reader = recipe.parallel.world // shared, rank // shared
    for first in range(0, len(rows), readers * size):
        numbers = range(first + reader * size, first + (reader + 1) * size)
        batch = collate([rows[number % len(rows)] for number in numbers])
        batch["labels"][[number >= len(rows) for number in numbers]] = IGNORED
        batch["shift_labels"] = shifted(batch.pop("labels"))
        yield {name: value.chunk(shared, dim=1)[rank % shared] for name, value in batch.items()}

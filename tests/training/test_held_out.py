"""The held-out loss: by pieces what all logits at once give, over every row once, however rows fall on
ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import NAMES, converted, random_ids
from torch.nn.functional import cross_entropy
from widest import Widest

from inplace_ttt import language_head
from inplace_ttt.surgery import disable_ttt
from inplace_ttt.training.loop import held_out
from inplace_ttt.training.loop.batches import collate, held_out_batches, shifted, with_document_lengths

from .recipes import tiny_recipe

LENGTHS = [(20, 27), (47,), (3, 8, 36)]


def rows(lengths: list[tuple[int, ...]] = LENGTHS) -> list[dict[str, Any]]:
    """Packed rows, the first label of each document ignored."""
    made = []
    for number, row in enumerate(lengths):
        ids = random_ids(sum(row), seed=number)
        positions = torch.cat([torch.arange(length) for length in row])
        labels = torch.where(positions == 0, -100, ids)
        made.append(
            {"input_ids": ids.tolist(), "position_ids": positions.tolist(), "labels": labels.tolist()}
        )
    return made


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_by_pieces_it_is_what_all_logits_give(name: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a family does to its logits: softcaps, scales, a head of another name."""
    model = converted(name).eval()
    batch = collate(rows())
    targets = shifted(batch.pop("labels"))
    with torch.no_grad(), disable_ttt(model) if not on else torch.no_grad():
        logits = model(**batch, use_cache=False).logits
        monkeypatch.setattr(language_head, "_AT_ONCE", 3 * 97 * 5)
        losses, hits, count = held_out.held_out_sums(model, batch, targets).tolist()
    assert count == (targets != -100).sum() == 3 * 47 - 6
    assert losses == pytest.approx(
        cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item(), rel=1e-5
    )
    assert hits == (logits.argmax(-1) == targets).sum()
    assert "forward" not in vars(model.base_model)


def test_it_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = converted("llama", chunk_size=64).eval(), random_ids(1, 256)
    monkeypatch.setattr(language_head, "_AT_ONCE", 97 * 16)
    with Widest() as made:
        held_out.held_out_sums(model, {"input_ids": ids}, ids)
    assert made.numbers < 256 * 97


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_row_counts_once(world: int, shared: int, size: int, tmp_path: Path) -> None:
    """And every rank gets as many batches of one shape, whatever the rows' number."""
    if world % shared:
        return
    recipe = tiny_recipe(
        tmp_path,
        training={"steps": 1, "batch_size": size},
        parallel={"nproc_per_node": world, "sequence_parallel_size": shared},
        monitor={"save_steps": 4},
    )
    for number in range(1, 6):
        held = rows([(48,)] * number)
        batches = [list(held_out_batches(held, recipe, rank)) for rank in range(world)]
        assert {len(b) for b in batches} == {-(-number // (world // shared * size))}
        assert {tuple(t.shape) for b in batches for batch in b for t in batch.values()} == {
            (size, 48 // shared)
        }
        seen = sorted(
            t for b in batches for batch in b for t in batch["shift_labels"].flatten().tolist() if t != -100
        )
        assert seen == sorted(label for row in held for label in row["labels"][1:])


def test_rows_as_one_row_of_all_documents() -> None:
    """Lengths as flash attention takes them; the loss of one row of all documents is that of the batch."""
    batch = collate(rows())
    flat = with_document_lengths(batch)
    assert flat["cu_seq_lens_q"].tolist() == [0, 20, 47, 94, 97, 105, 141] and flat["max_length_q"] == 47
    assert flat["cu_seq_lens_q"].dtype == torch.int32 and flat["input_ids"].shape == (1, 141)
    model = converted("llama").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(**flat, use_cache=False).logits.view(3, 47, -1), model(**batch, use_cache=False).logits
        )
        torch.testing.assert_close(model(**flat, use_cache=False).loss, model(**batch, use_cache=False).loss)

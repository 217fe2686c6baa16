"""Logits stand where something is learned, and nowhere else: the loss and every gradient are those of all
logits."""

from typing import Any

import pytest
import torch
from models import NAMES, converted

from inplace_ttt.training.loop.batches import collate, shifted, where_learned, with_document_lengths

from .test_held_out import LENGTHS, Widest, rows

TARGETS = 5


def batch(learned: float, seed: int = 0) -> dict[str, Any]:
    """Packed rows of which a share of the targets is learned."""
    made = collate(rows())
    ignored = torch.rand(made["labels"].shape, generator=torch.Generator().manual_seed(seed)) >= learned
    return {**made, "labels": made["labels"].masked_fill(ignored, -100)}


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs, num_items_in_batch=torch.tensor(TARGETS), use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("learned", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_all_logits(name: str, learned: float) -> None:
    model, inputs = converted(name).eval(), batch(learned)
    wanted = loss_and_gradients(model, inputs)
    found = loss_and_gradients(model, where_learned(inputs))
    assert len(found) == len(wanted) > 2 and (learned == 0) == (wanted[0] == 0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, float(other.abs().max())))


def test_as_flash_attention_takes_rows_and_as_ranks_share_them() -> None:
    inputs = batch(0.1)
    targets = shifted(inputs["labels"])
    flat = where_learned(with_document_lengths(inputs))
    assert flat["labels"].ne(-100).sum() == targets.ne(-100).sum()
    assert torch.equal(flat["labels"][0], shifted(inputs["labels"].reshape(1, -1))[0, flat["logits_to_keep"]])
    shared = {"input_ids": inputs["input_ids"], "shift_labels": targets}
    assert torch.equal(
        where_learned(shared)["shift_labels"], targets[:, where_learned(inputs)["logits_to_keep"]]
    )


def test_no_more_logits_are_made() -> None:
    model, vocabulary = converted("llama").eval(), 97
    few = batch(0.05)
    positions = len(where_learned(few)["logits_to_keep"])
    with Widest() as made:
        loss_and_gradients(model, where_learned(few))
    assert positions < sum(LENGTHS[0]) / 3 and made.numbers < len(LENGTHS) * sum(LENGTHS[0]) * vocabulary

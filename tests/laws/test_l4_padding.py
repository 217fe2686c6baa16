"""L4: a row alone is the same row in a padded batch."""

from typing import Any

import pytest
import torch
from models import CHUNK, NAMES, converted, distance, gradients, logits, random_ids
from torch import Tensor
from transformers import DynamicCache

from inplace_ttt import InPlaceTTTError, Session, disable_ttt
from inplace_ttt.families import CACHE

LENGTHS = (4 * CHUNK + 2, 2 * CHUNK + 5, CHUNK, 3)
WIDTH = LENGTHS[0]
ROWS = [random_ids(1, n, seed=n) for n in LENGTHS]


def batch(side: str, extra: int = 0) -> tuple[Tensor, Tensor]:
    """ids and mask [rows, WIDTH + extra], padded at the left, at the right or at both sides."""
    ids, mask = (
        random_ids(len(ROWS), WIDTH + extra, seed=99),
        torch.zeros(len(ROWS), WIDTH + extra, dtype=torch.long),
    )
    for r, row in enumerate(ROWS):
        room = WIDTH + extra - row.shape[1]
        start = {"left": room, "right": 0, "both": room // 2}[side]
        ids[r, start : start + row.shape[1]], mask[r, start : start + row.shape[1]] = row[0], 1
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    """As generate makes them: counted from each row's first real token."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_row_is_the_row_alone(name: str, side: str, use_cache: bool) -> None:
    model = converted(name)
    ids, mask = batch(side)
    found = logits(model, ids, attention_mask=mask, position_ids=positions(mask), use_cache=use_cache)
    for r, row in enumerate(ROWS):
        assert distance(found[r : r + 1, mask[r] == 1], logits(model, row)) < 5e-5, (
            f"row of {row.shape[1]} tokens"
        )


@pytest.mark.parametrize(
    ("name", "side"), [*((name, "left") for name in NAMES), ("llama", "right"), ("gpt2", "right")]
)
def test_a_padded_batch_goes_on_as_its_rows_would(name: str, side: str) -> None:
    """Prefill, a second turn of several tokens, then single tokens, with the rows at different places in
    their chunks.

    Right padding stays in the attention cache, where it uses up a sliding window: full attention only.
    """
    model = converted(name)
    turns = [1, CHUNK + 3, 1, 1, 1, 1, 1]
    ids, mask = batch(side)
    more = random_ids(len(ROWS), sum(turns), seed=50)
    cache = DynamicCache(config=model.config)
    found = [
        logits(
            model, ids, attention_mask=mask, position_ids=positions(mask), **{CACHE: cache}, use_cache=True
        )
    ]
    for turn in more.split(turns, 1):
        mask = torch.cat([mask, torch.ones_like(turn)], 1)
        where = positions(mask)[:, -turn.shape[1] :]
        found.append(
            logits(model, turn, attention_mask=mask, position_ids=where, **{CACHE: cache}, use_cache=True)
        )
    continued = torch.cat(found[1:], 1)
    for r, row in enumerate(ROWS):
        whole = torch.cat([row, more[r : r + 1]], 1)
        alone = logits(model, whole)[:, row.shape[1] :]
        assert distance(continued[r : r + 1], alone) < 5e-5
        with disable_ttt(model):
            assert distance(logits(model, whole)[:, row.shape[1] :], alone) > 0.01
    assert Session(model, cache).chunks_written == sum((n + sum(turns)) // CHUNK for n in LENGTHS)


@pytest.mark.parametrize("pieces", [[CHUNK] * 4 + [2], [1] * WIDTH, [WIDTH - 3, 3], [2, WIDTH - 2]], ids=str)
def test_a_left_padded_prefill_in_pieces(pieces: list[int]) -> None:
    """Some pieces are nothing but padding for some rows."""
    model = converted("llama")
    ids, mask = batch("left")
    cache, found, done = DynamicCache(config=model.config), [], 0
    for piece in ids.split(pieces, 1):
        done += piece.shape[1]
        where = positions(mask)[:, done - piece.shape[1] : done]
        found.append(
            logits(
                model,
                piece,
                attention_mask=mask[:, :done],
                position_ids=where,
                **{CACHE: cache},
                use_cache=True,
            )
        )
    for r, row in enumerate(ROWS):
        assert distance(torch.cat(found, 1)[r : r + 1, mask[r] == 1], logits(model, row)) < 5e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "starcoder2"])
def test_padding_leaves_gradients_alone(name: str, side: str) -> None:
    model = converted(name, torch.float64).train()
    ids, mask = batch(side)
    cotangent = torch.randn(
        len(ROWS), WIDTH, 97, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ) * mask.unsqueeze(-1)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    found = gradients(model, (out * cotangent).sum())
    loss = torch.zeros((), dtype=torch.float64)
    for r, row in enumerate(ROWS):
        loss = loss + (model(input_ids=row, use_cache=False).logits[0] * cotangent[r, mask[r] == 1]).sum()
    expected = gradients(model, loss)
    assert found.keys() == expected.keys() and sum(".ttt." in key for key in found) == 4
    for key, value in found.items():
        assert distance(value, expected[key]) < 2e-5, key


@pytest.mark.parametrize("use_cache", [False, True])
def test_what_stands_in_the_padding_is_never_read(use_cache: bool) -> None:
    model = converted("llama")
    for side in ("left", "right"):
        ids, mask = batch(side)
        other = torch.where(mask == 1, ids, 3 + (ids + 5) % 94)
        a, b = (
            logits(model, x, attention_mask=mask, position_ids=positions(mask), use_cache=use_cache)
            for x in (ids, other)
        )
        assert torch.equal(a[mask == 1], b[mask == 1]) and not torch.equal(a[mask == 0], b[mask == 0])


def refused(mask: Tensor, **arguments: Any) -> None:
    logits(converted("llama"), random_ids(*mask.shape), attention_mask=mask, **arguments)


@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_inside_a_row_is_refused(use_cache: bool) -> None:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 5] = 0
    with pytest.raises(
        InPlaceTTTError, match=r"row 1 has padding between tokens 0 and 20; pad at the left or the right only"
    ):
        refused(mask, use_cache=use_cache)

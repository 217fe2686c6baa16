"""L3: documents packed in a row are what they are apart."""

import contextlib
from typing import Any

import pytest
import torch
from families import build
from models import CHUNK, NAMES, converted, distance, gradients, logits, random_ids
from torch import Tensor, nn
from upstream import before

from inplace_ttt import InPlaceTTTError, disable_ttt

# The families whose attention keeps packed documents apart (in transformers, by position_ids and nothing
# else). In older transformers a base may not look at positions itself.
BLIND = {*(["moshi"] if before("5.19") else []), *(["falcon"] if before("5.24") else [])}
PACKING = tuple(name for name in NAMES if name not in BLIND)
ROWS: dict[str, list[list[int]]] = {
    "two documents": [[17, 20]],
    "single tokens and whole chunks": [[1, 1, 2 * CHUNK, 3 * CHUNK, 2, CHUNK + 1]],
    "rows of their own": [[19, 4, 15], [38], [CHUNK, CHUNK + 1, 23]],
}


def packed(rows: list[list[int]]) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """The documents apart [1, n], packed [rows, T], and the packed position_ids."""
    documents = [[random_ids(1, n, seed=10 * r + i) for i, n in enumerate(row)] for r, row in enumerate(rows)]
    ids = torch.cat([torch.cat(row, 1) for row in documents])
    return documents, ids, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def apart(model: nn.Module, documents: list[list[Tensor]]) -> Tensor:
    return torch.cat(
        [torch.cat([model(input_ids=d, use_cache=False).logits for d in row], 1) for row in documents]
    )


def cu_seq_lens(row: list[int]) -> dict[str, Any]:
    ends = torch.tensor([0, *row]).cumsum(0).to(torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(row), "max_length_k": max(row)}


def test_the_list_of_packing_families_is_right() -> None:
    documents, ids, positions = packed(ROWS["two documents"])
    found = []
    for name in NAMES:
        base = build(name)
        with torch.no_grad():
            found += [name] * (
                distance(logits(base, ids, position_ids=positions), apart(base, documents)) < 1e-4
            )
    assert tuple(found) == PACKING


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", PACKING)
def test_packed_is_apart(name: str, rows: str) -> None:
    model = converted(name)
    documents, ids, positions = packed(ROWS[rows])
    with torch.no_grad():
        expected = apart(model, documents)
        with disable_ttt(model):
            assert distance(apart(model, documents), expected) > 0.02
    assert distance(logits(model, ids, position_ids=positions), expected) < 5e-5
    if len(ROWS[rows]) == 1:
        assert (
            distance(logits(model, ids, position_ids=positions, **cu_seq_lens(ROWS[rows][0])), expected)
            < 5e-5
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"target": "hidden_states", "conv": "causal", "eta": (0.5, 2.0)}],
    ids=["embeddings", "hidden states"],
)
@pytest.mark.parametrize("name", PACKING)
def test_packed_gradients_are_those_apart(name: str, options: dict[str, Any]) -> None:
    model = converted(name, torch.float64, **options).train()
    documents, ids, positions = packed(ROWS["rows of their own"])
    packed_logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    cotangent = torch.randn(
        packed_logits.shape, generator=torch.Generator().manual_seed(2), dtype=packed_logits.dtype
    )
    found = gradients(model, (packed_logits * cotangent).sum())
    expected = gradients(model, (apart(model, documents) * cotangent).sum())
    assert found.keys() == expected.keys() and sum(".ttt." in key for key in found) == 4
    for key, value in found.items():
        assert expected[key].abs().max() > 0 and distance(value, expected[key]) < 2e-5, key


@pytest.mark.parametrize("name", PACKING)
def test_a_document_knows_nothing_of_its_neighbors(name: str) -> None:
    model = converted(name)
    _, ids, positions = packed([[17, 20, 9]])
    before = logits(model, ids, position_ids=positions)
    for changed in (0, 16, 37, 45):
        other = ids.clone()
        other[0, changed] = 3 + (other[0, changed] - 2) % 94
        after = logits(model, other, position_ids=positions)
        same = [
            torch.equal(a, b)
            for a, b in zip(before.split([17, 20, 9], 1), after.split([17, 20, 9], 1), strict=True)
        ]
        assert same == [changed >= 17, True, changed < 37]


@pytest.mark.parametrize("chunk_size", [1, CHUNK, 100])
def test_chunks_are_counted_from_each_document(chunk_size: int) -> None:
    model = converted("llama", chunk_size=chunk_size)
    documents, ids, positions = packed(ROWS["rows of their own"])
    with torch.no_grad():
        assert distance(logits(model, ids, position_ids=positions), apart(model, documents)) < 5e-5


DOCUMENTS, IDS, POSITIONS = packed(ROWS["two documents"])
CU = cu_seq_lens([17, 20])
MASK = torch.ones_like(IDS)
PADDED = torch.cat([MASK[:, :-3], torch.zeros_like(MASK[:, -3:])], 1)
AT = {"position_ids": POSITIONS}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "cu_seq_lens against position_ids": (
        "cu_seq_lens and position_ids disagree.*derive both",
        AT | cu_seq_lens([18, 19]),
    ),
    "cu_seq_lens against one ramp": (
        "cu_seq_lens and position_ids disagree.*derive both",
        CU | {"position_ids": torch.arange(37)[None]},
    ),
    "cu_seq_lens of several rows": (
        "cu_seq_lens describe one packed row, but the batch has 2",
        AT | CU | {"ids": IDS.repeat(2, 1)},
    ),
    "cu_seq_lens beyond the row": ("leaves 0:37", AT | cu_seq_lens([17, 30])),
    "a mask of ones": ("drop attention_mask for packed rows", AT | {"attention_mask": MASK}),
    "a mask with padding": ("attention_mask", AT | {"attention_mask": PADDED}),
    "cu_seq_lens and a mask of ones": ("attention_mask", AT | CU | {"attention_mask": MASK}),
    "cu_seq_lens and a mask with padding": ("attention_mask", AT | CU | {"attention_mask": PADDED}),
    "a mask of ones and a cache": ("use_cache=False", AT | {"attention_mask": MASK, "use_cache": True}),
    "a cache": ("pass use_cache=False for packed rows", AT | {"use_cache": True}),
    "a cache and cu_seq_lens": ("use_cache=False", CU | {"use_cache": True}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_packing_that_attention_would_not_see_is_refused(case: str) -> None:
    message, arguments = REFUSED[case]
    with pytest.raises(InPlaceTTTError, match=message):
        logits(converted("llama"), **{"ids": IDS, **arguments})


def test_packed_training_with_the_default_cache_is_refused() -> None:
    """Without use_cache=False the model makes a cache, and with one transformers' attention sees a single
    document."""
    model = converted("llama").train()
    with pytest.raises(InPlaceTTTError, match="use_cache=False"):
        model(input_ids=IDS, position_ids=POSITIONS)


def test_cu_seq_lens_without_positions_do_not_part_ways_with_attention() -> None:
    """sdpa and eager attention know documents by position_ids alone: agree with them, or refuse."""
    model = converted("llama")
    with torch.no_grad():
        expected = apart(model, DOCUMENTS)
        found = expected
        with contextlib.suppress(InPlaceTTTError):
            found = logits(model, IDS, **CU)
    assert distance(found, expected) < 5e-5

"""Packing, by its properties: over odd lengths nothing is lost, no border is crossed, padding changes
nothing."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import CHUNK, converted, distance
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from inplace_ttt.layout import ChunkLayout
from inplace_ttt.training.data.packing import Size, count, lay_out, pack

PAD = 99_999
Row = dict[str, np.ndarray]


def cases() -> list[Any]:
    """(document lengths, row length, alignment): the edges by hand, the rest by chance."""
    by_hand = [
        ([1], 2, 1),
        ([2], 2, 1),
        ([3], 2, 1),
        ([1, 1, 1], 3, 1),
        ([6, 1], 6, 1),
        ([7], 6, 1),
        ([12], 6, 3),
        ([0, 5, 0, 0, 3, 0], 4, 1),
        ([1, 1, 1, 1], 6, 3),
        ([3, 4, 3], 6, 3),
        ([64, 1], 32, 32),
    ]
    random_cases = []
    for seed in range(60):
        rng = random.Random(seed)
        align = rng.choice([1, 1, 2, 3, 7])
        row_length = align * rng.randint(2 if align == 1 else 1, 11)
        random_cases.append(
            (
                [rng.choice([0, 1, 2, rng.randint(1, 40)]) for _ in range(rng.randint(1, 25))],
                row_length,
                align,
            )
        )
    return by_hand + random_cases


CASES = [pytest.param(*case, id=f"{i}") for i, case in enumerate(cases())]


def documents(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, n)) for n in lengths]


def packed(lengths: list[int], row_length: int, align: int) -> list[Row]:
    return list(pack(documents(lengths), row_length, PAD, align))


def pieces(row: Row) -> list[list[int]]:
    """The documents of a row as positions tell them, padding left out."""
    spans = ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], 1).documents[0]
    found = [row["input_ids"][start:stop].tolist() for start, stop in spans]
    for piece in found:
        assert PAD not in piece or set(piece) == {PAD}, "padding stands in a document"
    return [piece for piece in found if PAD not in piece]


@pytest.mark.parametrize(("lengths", "row_length", "align"), CASES)
def test_nothing_is_lost_and_nothing_moves(lengths: list[int], row_length: int, align: int) -> None:
    rows = packed(lengths, row_length, align)
    tokens = np.concatenate([row["input_ids"] for row in rows]) if rows else np.array([])
    assert tokens[tokens != PAD].tolist() == list(range(sum(lengths)))
    assert all(
        len(row[name]) == row_length for row in rows for name in ("input_ids", "position_ids", "labels")
    )
    if align == 1:
        assert len(rows) == -(-sum(lengths) // row_length)
        assert all(PAD not in row["input_ids"] for row in rows[:-1])


@pytest.mark.parametrize(("lengths", "row_length", "align"), CASES)
def test_positions_tell_the_documents_apart(lengths: list[int], row_length: int, align: int) -> None:
    """Every piece belongs to one document, no two neighbors to one, and transformers sees the same
    borders."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for row in packed(lengths, row_length, align):
        owners = [set(owner[piece].tolist()) for piece in pieces(row)]
        assert all(len(o) == 1 for o in owners)
        assert all(a != b for a, b in itertools.pairwise(owners))
        positions = torch.tensor(row["position_ids"])[None]
        starts = torch.zeros_like(positions)
        for i, (start, stop) in enumerate(ChunkLayout.from_position_ids(positions, 1).documents[0]):
            assert positions[0, start:stop].tolist() == list(range(stop - start))
            starts[0, start:stop] = i
        theirs = find_packed_sequence_indices(positions.long())
        assert starts.max() == 0 if theirs is None else torch.equal(theirs, starts)


@pytest.mark.parametrize(("lengths", "row_length", "align"), CASES)
def test_nothing_is_predicted_across_a_border(lengths: list[int], row_length: int, align: int) -> None:
    for row in packed(lengths, row_length, align):
        ids, positions, labels = row["input_ids"], row["position_ids"], row["labels"]
        predicted = labels != -100
        assert (predicted == ((positions > 0) & (ids != PAD))).all()
        assert (labels[predicted] == ids[predicted]).all()


@pytest.mark.parametrize(("lengths", "row_length", "align"), [case for case in CASES if case.values[2] > 1])
def test_aligned_chunks_stay_on_the_grid(lengths: list[int], row_length: int, align: int) -> None:
    """Real documents start on the grid, and no chunk of anything crosses it: ranks may be cut at any of its
    points."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for row in packed(lengths, row_length, align):
        layout = ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], align)
        for document in layout.documents[0]:
            assert document[0] % align == 0 or row["input_ids"][document[0]] == PAD
            assert all(start // align == (stop - 1) // align for start, stop in layout.chunks(document))
        first = [owner[piece[0]] for piece in pieces(row)]
        assert len(first) == len(set(first)), "a document is cut inside a row"


@pytest.mark.parametrize(("lengths", "row_length", "align"), CASES)
def test_the_counts_are_those_of_the_rows(lengths: list[int], row_length: int, align: int) -> None:
    for chunk in (1, 2, 3, 50):
        rows = packed(lengths, row_length, align)
        found = sorted(len(piece) for row in rows for piece in pieces(row))
        chunks = sorted(-(-n // chunk) for n in found)
        counts = count(map(Size, lengths), row_length, chunk, align)
        assert (counts.rows, counts.tokens, counts.pieces) == (len(rows), sum(lengths), len(found))
        assert counts.long_tokens == sum(n for n in found if n > chunk)
        assert counts.writes == ChunkLayout.from_lengths([[n] for n in found], chunk).writes()
        assert counts.median_chunks == (chunks[(len(chunks) - 1) // 2] if chunks else 0)


def test_packing_reads_no_further_than_the_row() -> None:
    read = []

    def endless() -> Iterator[list[int]]:
        for i in itertools.count():
            read.append(i)
            yield [i] * 5

    rows = pack(endless(), 12, PAD)
    next(rows)
    assert read == [0, 1, 2]
    next(rows)
    assert read == [0, 1, 2, 3, 4]


def test_lay_out_says_where_each_piece_stands() -> None:
    assert list(lay_out([Size(4), Size(3)], 5)) == [[(0, 0, 4, 0, 0), (1, 0, 1, 4, 0)], [(1, 1, 3, 0, 0)]]
    assert list(lay_out([Size(4), Size(3)], 6, align=3)) == [[(0, 0, 4, 0, 0)], [(1, 0, 3, 0, 0)]]
    assert list(lay_out([Size(4, lead=1), Size(5, lead=2)], 5)) == [
        [(0, 0, 4, 0, 0), (1, 0, 1, 4, 0)],
        [(1, 1, 4, 0, 2)],
        [(1, 4, 5, 0, 2)],
    ]


BEGINS = [PAD + 1, PAD + 2]


@pytest.mark.parametrize("align", [1, 3])
@pytest.mark.parametrize("lengths", [[20, 7, 0, 40, 1], [3], [25]])
def test_each_piece_begins_as_its_document(lengths: list[int], align: int) -> None:
    """A document that begins with special tokens has them in every row; in one that does not, they stand in
    none. Nothing else is lost."""
    marked = [[*(BEGINS if i % 2 == 0 else ()), *tokens] for i, tokens in enumerate(documents(lengths))]
    rows = list(pack(marked, 12, PAD, align, BEGINS))
    found, owner = (
        [piece for row in rows for piece in pieces(row)],
        np.repeat(np.arange(len(lengths)), lengths),
    )
    for piece in found:
        kept = [token for token in piece if token < PAD]
        begins_so = not kept or owner[kept[0]] % 2 == 0
        assert piece == ([*BEGINS, *kept] if begins_so else kept)[-len(piece) :] and (
            not kept or (piece[:2] == BEGINS) == begins_so
        )
    assert [token for piece in found for token in piece if token < PAD] == list(range(sum(lengths)))
    sizes = [Size(len(tokens), 2 if i % 2 == 0 else 0) for i, tokens in enumerate(marked)]
    counts = count(sizes, 12, 5, align)
    assert (counts.rows, counts.tokens, counts.pieces) == (len(rows), sum(map(len, found)), len(found))
    for at, whole in enumerate(rows[1:], 1):  # from any row on, as a cache and a stream read them
        first = list(lay_out(sizes, 12, align))[at][0]
        again = next(pack(marked[first.document :], 12, PAD, align, BEGINS, used=first.start))
        assert all(np.array_equal(again[name], whole[name]) for name in whole)


@pytest.mark.parametrize("align", [1, CHUNK])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_packed_row_trains_as_its_documents_apart(name: str, align: int) -> None:
    """Loss and gradients of packed rows: those of the pieces one by one, weighted by their labels, whatever
    the padding is."""
    model = converted(name, torch.float64)
    lengths = [23, 1, 9, 40, 2, 14]
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]

    def losses(rows: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        total, labeled = torch.zeros((), dtype=torch.float64), 0
        for row in rows:
            n = int((row["labels"][:, 1:] != -100).sum())
            if n:
                total, labeled = total + model(**row, use_cache=False).loss * n, labeled + n
        (total / labeled).backward()
        return (total / labeled).detach(), {
            key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None
        }

    def as_batches(rows: list[Row]) -> list[dict[str, Tensor]]:
        return [{key: torch.tensor(value)[None].long() for key, value in row.items()} for row in rows]

    row_length = 5 * CHUNK
    apart = []
    for row in lay_out(map(Size, lengths), row_length, align):
        for document, start, stop, *_ in row:
            ids = torch.tensor(texts[document][start:stop])[None]
            apart.append({"input_ids": ids, "position_ids": torch.arange(stop - start)[None], "labels": ids})
    expected, expected_gradients = losses(apart)
    for pad in (0, 50):
        loss, gradients = losses(as_batches(list(pack(texts, row_length, pad, align))))
        assert abs(loss - expected) < 1e-5  # transformers computes the loss in float32
        assert gradients.keys() == expected_gradients.keys()
        assert max(distance(gradients[key], expected_gradients[key]) for key in gradients) < 1e-5

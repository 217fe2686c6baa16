"""The grid of chunks: every way to describe documents gives the same one, and nonsense is refused."""

import itertools

import pytest
import torch

from inplace_ttt import InPlaceTTTError
from inplace_ttt.layout import ChunkLayout

LENGTHS: list[list[list[int]]] = [
    [[10]],
    [[3, 4, 3]],
    [[1, 1, 1]],
    [[7, 1], [8]],
    [[2, 6], [], [8]],
    [[9], [4], [1]],
]
CHUNK_SIZES = (1, 3, 4, 100)
TABLE = list(itertools.product(LENGTHS, CHUNK_SIZES))


@pytest.mark.parametrize(("lengths", "chunk_size"), TABLE)
def test_chunks_tile_their_document(lengths: list[list[int]], chunk_size: int) -> None:
    layout = ChunkLayout.from_lengths(lengths, chunk_size)
    assert layout.batch == len(lengths) and layout.length == max(map(sum, lengths))
    for row, documents in zip(lengths, layout.documents, strict=True):
        assert [stop - start for start, stop in documents] == row
        assert [start for start, _ in documents] == [sum(row[:i]) for i in range(len(row))]
        for document in documents:
            chunks = list(layout.chunks(document))
            assert [chunk[0] for chunk in chunks] == [document[0], *(chunk[1] for chunk in chunks[:-1])]
            assert chunks[-1][1] == document[1]
            assert all(layout.is_complete(chunk) for chunk in chunks[:-1])
            assert layout.is_complete(chunks[-1]) == ((document[1] - document[0]) % chunk_size == 0)


@pytest.mark.parametrize(("lengths", "chunk_size"), TABLE)
def test_chunk_ids_are_the_chunks(lengths: list[list[int]], chunk_size: int) -> None:
    layout = ChunkLayout.from_lengths(lengths, chunk_size, length=12)
    ids = layout.chunk_ids()
    assert ids.dtype == torch.int32 and ids.shape == (len(lengths), 12)
    assert layout.chunk_ids() is ids, "made once"
    for row, documents in enumerate(layout.documents):
        chunks = [chunk for document in documents for chunk in layout.chunks(document)]
        expected = [-1] * 12
        for number, (start, stop) in enumerate(chunks):
            expected[start:stop] = [number] * (stop - start)
        assert ids[row].tolist() == expected


@pytest.mark.parametrize(("lengths", "chunk_size"), TABLE)
def test_writes_counts_the_deltas_that_are_read(lengths: list[list[int]], chunk_size: int) -> None:
    layout = ChunkLayout.from_lengths(lengths, chunk_size)
    chunks = [list(layout.chunks(document)) for row in layout.documents for document in row]
    assert layout.writes() == sum(len(of_document) - 1 for of_document in chunks)


@pytest.mark.parametrize("lengths", [x for x in LENGTHS if all(sum(row) == sum(x[0]) for row in x)], ids=str)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_positions_and_cu_seqlens_give_the_same(lengths: list[list[int]], chunk_size: int) -> None:
    expected = ChunkLayout.from_lengths(lengths, chunk_size)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    assert ChunkLayout.from_position_ids(positions, chunk_size) == expected
    assert ChunkLayout.from_position_ids(positions + 1000, chunk_size) == expected, (
        "positions may start anywhere"
    )
    if len(lengths) == 1:
        ends = torch.tensor([0, *lengths[0]]).cumsum(0)
        for dtype in (torch.int32, torch.int64):
            assert ChunkLayout.from_cu_seqlens(ends.to(dtype), chunk_size) == expected


def test_a_position_that_does_not_follow_starts_a_document() -> None:
    positions = torch.tensor([[0, 1, 5, 6, 6, 5], [0, 0, 0, 1, 2, 3]])
    layout = ChunkLayout.from_position_ids(positions, 4)
    assert layout.documents == (((0, 2), (2, 4), (4, 5), (5, 6)), ((0, 1), (1, 2), (2, 6)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_at_the_left_the_right_and_both(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).to(dtype)
    layout = ChunkLayout.from_attention_mask(mask, 2)
    assert layout.documents == (((0, 4),), ((2, 4),), ((0, 2),), ((1, 3),), ())
    assert (layout.length, layout.chunk_size) == (4, 2)


def test_empty_documents_of_cu_seqlens_vanish() -> None:
    layout = ChunkLayout.from_cu_seqlens(torch.tensor([0, 0, 4, 4, 6]), 3, length=9)
    assert layout.documents == (((0, 4), (4, 6)),) and layout.length == 9


def test_nothing_at_all() -> None:
    layout = ChunkLayout.from_lengths([[], []], 4)
    assert (layout.length, layout.writes(), layout.chunk_ids().shape) == (0, 0, (2, 0))


REFUSED = {
    "chunk_size must be at least 1, got 0": lambda: ChunkLayout.from_lengths([[3]], 0),
    "row 1 has document 0:0, which is empty, overlaps, or leaves 0:3": lambda: ChunkLayout.from_lengths(
        [[3], [0]], 2
    ),
    "row 0 has document 0:3, which is empty, overlaps, or leaves 0:2": lambda: ChunkLayout.from_lengths(
        [[3, -1]], 2
    ),
    "row 0 has document 0:5, which is empty, overlaps, or leaves 0:4": lambda: ChunkLayout.from_lengths(
        [[5]], 2, length=4
    ),
    "row 0 has document 2:4, which is empty, overlaps": lambda: ChunkLayout((((0, 3), (2, 4)),), 5, 2),
    "row 0 has document -1:2": lambda: ChunkLayout((((-1, 2),),), 5, 2),
    "row 1 has padding between tokens 0 and 3; pad at the left or the right only": lambda: (
        ChunkLayout.from_attention_mask(torch.tensor([[1, 1, 1], [1, 0, 1]]), 2)
    ),
    "cu_seqlens must start at 0, never decrease, and have at least two numbers, got [1, 4]": lambda: (
        ChunkLayout.from_cu_seqlens(torch.tensor([1, 4]), 2)
    ),
    "cu_seqlens must start at 0, never decrease, and have at least two numbers, got [0]": lambda: (
        ChunkLayout.from_cu_seqlens(torch.tensor([0]), 2)
    ),
    "got [0, 4, 3]": lambda: ChunkLayout.from_cu_seqlens(torch.tensor([0, 4, 3]), 2),
    "row 0 has document 4:9, which is empty, overlaps, or leaves 0:8": lambda: ChunkLayout.from_cu_seqlens(
        torch.tensor([0, 4, 9]), 2, 8
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_row_and_the_place(message: str) -> None:
    with pytest.raises(InPlaceTTTError) as error:
        REFUSED[message]()
    assert message in str(error.value)

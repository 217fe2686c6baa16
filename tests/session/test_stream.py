"""FastWeightStream alone, with a small writer in the place of a layer, against a model that keeps every
token."""

import copy
import random

import pytest
import torch
from small_stream import CHUNK, ETA, D, H, KeepsEverything, SmallWriter, inputs, read, state_of

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.layer.stream import _UNDO_REACH, FastWeightStream
from inplace_ttt.layout import Span


def assert_same_memory(stream: FastWeightStream, other: FastWeightStream) -> None:
    """Bit-equal: counts, states, and what the next calls read, one of which completes a chunk."""
    assert stream.tokens == other.tokens
    for row in range(stream.batch):
        assert torch.equal(state_of(stream, row), state_of(other, row))
    stream, other = copy.deepcopy(stream), copy.deepcopy(other)
    for seed, length in enumerate((2, 1, CHUNK + 3, 1)):
        assert torch.equal(read(stream, length, 90 + seed), read(other, length, 90 + seed))


def test_less_than_a_chunk_allocates_no_state():
    stream = FastWeightStream(2, CHUNK)
    out, z, x = inputs(2, CHUNK - 1)
    before = out.clone()
    assert torch.equal(stream.advance(out, z, x, [(0, CHUNK - 1)] * 2, SmallWriter()), before)
    assert stream.state is None
    read(stream, 1, seed=1)
    assert stream.state is not None and stream.state.dtype == torch.float32
    assert stream.written == [1, 1] and stream.filled == [0, 0]


@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (3, 5, 4), (4, 4, 4), (9, 3), (2, 10)])
def test_a_complete_chunk_costs_one_write_of_its_own_rows(pieces):
    writer, stream, naive = SmallWriter(), FastWeightStream(1, CHUNK), KeepsEverything(1)
    for seed, length in enumerate(pieces):
        out, z, x = inputs(1, length, seed=seed)
        expected = naive.advance(out.clone(), z, x, [(0, length)])
        torch.testing.assert_close(stream.advance(out, z, x, [(0, length)], writer), expected)
    assert len(writer.chunks) == sum(pieces) // CHUNK
    keys = torch.stack([z for z, _ in naive.tokens(0)])
    assert torch.equal(torch.cat(writer.chunks), keys[: len(writer.chunks) * CHUNK])
    assert torch.equal(state_of(stream, 0), naive.state(0))


def test_the_open_chunk_grows_with_what_is_read():
    writer, stream = SmallWriter(chunk_size=200), FastWeightStream(2, 200)
    _, z, x = inputs(2, 200)
    for start, stop in ((0, 1), (1, 64), (64, 65), (65, 190), (190, 200)):
        if stop < 200:
            assert all(held.shape[1] <= max(64, 2 * start) for held in stream._open.held)
        stream.advance(
            torch.zeros(2, stop - start, D),
            z[:, start:stop],
            x[:, start:stop],
            [(0, stop - start)] * 2,
            writer,
        )
    assert torch.equal(torch.stack(writer.chunks), z)


@pytest.mark.parametrize(("before", "length", "cropped"), [(6, 3, 2), (5, 2, 1), (6, 1, 1), (2, 1, 1)])
def test_crop_inside_the_open_chunk_leaves_no_trace(before, length, cropped):
    assert (before + length - cropped) // CHUNK == before // CHUNK or cropped <= (before + length) % CHUNK
    assert_crop_leaves_no_trace(before, length, cropped)


@pytest.mark.parametrize(
    ("before", "length", "cropped"),
    [(0, 4, 1), (2, 3, 2), (3, 6, 2), (6, 3, 3), (7, 1, 1), (6, 5, 5), (3, 16, 6)],
)
def test_crop_across_the_last_written_chunk_leaves_no_trace(before, length, cropped):
    assert (before + length - cropped) // CHUNK == (before + length) // CHUNK - 1
    assert_crop_leaves_no_trace(before, length, cropped)


def assert_crop_leaves_no_trace(before: int, length: int, cropped: int) -> None:
    once, never = FastWeightStream(2, CHUNK), FastWeightStream(2, CHUNK)
    for stream in (once, never):
        if before:
            read(stream, before, seed=0)
    out, z, x = inputs(2, length, seed=1)
    kept = length - cropped
    once.advance(out.clone(), z, x, [(0, length)] * 2, SmallWriter())
    once.crop(cropped)
    if kept:
        never.advance(out[:, :kept].clone(), z[:, :kept], x[:, :kept], [(0, kept)] * 2, SmallWriter())
    assert_same_memory(once, never)


def test_tokens_read_one_by_one_can_be_cropped_together():
    """An assistant model reads its guesses one call each, then takes several back."""
    once, never = FastWeightStream(1, CHUNK), FastWeightStream(1, CHUNK)
    for seed in range(6):
        read(once, 1, seed)
        if seed < 3:
            read(never, 1, seed)
    once.crop(3)
    assert_same_memory(once, never)


@pytest.mark.parametrize("cropped", [6, 7, 11])
def test_crop_behind_the_last_written_chunk_is_refused_and_changes_nothing(cropped):
    stream = FastWeightStream(1, CHUNK)
    read(stream, 13, seed=0)
    untouched = copy.deepcopy(stream)
    with pytest.raises(InPlaceTTTError, match=f"last {cropped} tokens") as refusal:
        stream.crop(cropped)
    assert "\n" not in str(refusal.value)
    assert_same_memory(stream, untouched)


@pytest.mark.parametrize("cropped", [13, 20])
def test_crop_of_everything_resets(cropped):
    stream = FastWeightStream(2, CHUNK)
    read(stream, 13, seed=0)
    stream.crop(cropped)
    assert stream.tokens == [0, 0] and stream.state is None
    assert_same_memory(stream, FastWeightStream(2, CHUNK))


def test_crop_of_nothing_keeps_everything():
    stream = FastWeightStream(1, CHUNK)
    read(stream, 7, seed=0)
    untouched = copy.deepcopy(stream)
    stream.crop(0)
    assert_same_memory(stream, untouched)


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1], [0], [0, 0, 1, 1, 2, 2]])
def test_select_moves_repeats_and_drops_rows(rows):
    stream = FastWeightStream(3, CHUNK)
    out, z, x = inputs(3, 12)
    spans = [(0, 12), (4, 12), (9, 12)]  # three chunks, two chunks, three tokens
    stream.advance(out, z, x, spans, SmallWriter())
    stream.select(rows)
    alone = FastWeightStream(len(rows), CHUNK)
    alone.advance(out[rows].clone(), z[rows], x[rows], [spans[row] for row in rows], SmallWriter())
    assert_same_memory(stream, alone)
    stream.crop(2)  # what it takes to step back moved along
    alone.crop(2)
    assert_same_memory(stream, alone)


def test_deep_copies_are_independent():
    stream = FastWeightStream(1, CHUNK)
    read(stream, 10, seed=0)
    fork, untouched = copy.deepcopy(stream), copy.deepcopy(stream)
    read(fork, 9, seed=1)
    assert_same_memory(stream, untouched)
    assert fork.tokens == [19] and not torch.equal(state_of(fork, 0), state_of(stream, 0))


def test_generated_tokens_write_only_when_they_should():
    writer, stream = SmallWriter(), FastWeightStream(1, CHUNK, update_on_decode=False)
    read(stream, 6, seed=0, writer=writer)
    before = state_of(stream, 0).clone()
    for seed in range(5):
        out, z, x = inputs(1, 1, seed=seed)
        expected = out + ETA * (z @ before.T)
        torch.testing.assert_close(stream.advance(out, z, x, [(0, 1)], writer, generated=True), expected)
    assert torch.equal(state_of(stream, 0), before) and stream.tokens == [6]
    read(stream, 1, seed=0, writer=writer)  # one token of text
    assert stream.tokens == [7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", ["no padding", "padding"])
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.sample(12)
def test_any_sequence_of_operations_equals_recomputation(seed, padding, dtype):
    """Reads, crops, forks and selections in random order; a crop may be refused, but then nothing has
    changed."""
    rng = random.Random(seed)
    batch = rng.randint(1, 3)
    stream, naive = FastWeightStream(batch, CHUNK), KeepsEverything(batch)
    branches: list[tuple[FastWeightStream, KeepsEverything]] = []
    last = cropped_since = 0
    for step in range(40):
        operation = rng.choices(("advance", "crop", "fork", "swap", "select"), (10, 6, 1, 1, 1))[0]
        if operation == "advance":
            last, cropped_since = rng.choice((1, 1, 2, 3, CHUNK, 2 * CHUNK + 1)), 0
            out, z, x = inputs(stream.batch, last, dtype, seed=1000 * seed + step)
            spans = [
                random_span(rng, last) if padding == "padding" else (0, last) for _ in range(stream.batch)
            ]
            expected = naive.advance(out.clone(), z, x, spans)
            actual = stream.advance(out, z, x, spans, SmallWriter())
            for row, (start, stop) in enumerate(spans):
                tolerance = {} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.3}
                torch.testing.assert_close(
                    actual[row, start:stop].float(), expected[row, start:stop], **tolerance
                )
        elif operation == "crop":
            cropped = rng.randint(0, last)
            try:
                stream.crop(cropped)
            except InPlaceTTTError:
                assert padding == "padding" or cropped_since + cropped > CHUNK
            else:
                naive.crop(cropped)
                last, cropped_since = last - cropped, cropped_since + cropped
        elif operation == "fork":
            branches.append((copy.deepcopy(stream), copy.deepcopy(naive)))
        elif operation == "swap" and branches:
            other = branches.pop(rng.randrange(len(branches)))
            branches.append((stream, naive))
            (stream, naive), last = other, 0
        elif operation == "select":
            rows = [rng.randrange(stream.batch) for _ in range(rng.randint(1, 3))]
            stream.select(rows)
            naive.select(rows)
        for memory, truth in ((stream, naive), *branches):
            assert memory.tokens == [len(truth.tokens(row)) for row in range(memory.batch)]
            for row in range(memory.batch):
                assert torch.equal(state_of(memory, row), truth.state(row)), (step, operation)


def random_span(rng: random.Random, length: int) -> Span:
    """All of it, padding at the left, at the right, or nothing but padding."""
    kind = rng.choices(("all", "left", "right", "nothing"), (5, 2, 1, 1))[0]
    cut = rng.randint(0, length - 1)
    return {"all": (0, length), "left": (cut, length), "right": (0, length - cut), "nothing": (0, 0)}[kind]


@pytest.mark.parametrize("after", [_UNDO_REACH, _UNDO_REACH + 1, _UNDO_REACH + 2])
def test_a_written_chunk_can_be_taken_back_for_a_while(after: int) -> None:
    """An undo costs as much memory as the state, so that it goes once enough tokens were read behind its
    chunk."""
    chunk = 2 * _UNDO_REACH
    stream, writer = FastWeightStream(1, chunk), SmallWriter(chunk)
    generator = torch.Generator().manual_seed(0)
    for length in (chunk, *[1] * after):
        z, x = torch.randn(1, length, H, generator=generator), torch.randn(1, length, D, generator=generator)
        stream.advance(torch.zeros(1, length, D), z, x, [(0, length)], writer)
    if after <= _UNDO_REACH + 1:
        stream.crop(after + 1)
        assert stream.tokens == [chunk - 1] and not stream.state.any()
    else:
        with pytest.raises(InPlaceTTTError, match="written for good"):
            stream.crop(after + 1)
        assert stream.tokens == [chunk + after]


def test_nothing_is_kept_to_step_back_where_one_cannot() -> None:
    """Where generated tokens are not written every crop is refused, and behind padding a row's last chunk is
    out of reach."""
    stream, unpadded, padded = (
        FastWeightStream(1, CHUNK, update_on_decode=False),
        *(FastWeightStream(1, CHUNK) for _ in range(2)),
    )
    for each in (stream, unpadded, padded):
        read(each, CHUNK + 1, seed=0)
    padded.skip()
    for each in (stream, unpadded, padded):
        read(each, 1, seed=1)
    assert [each.rows[0].undo is None for each in (stream, unpadded, padded)] == [True, False, True]
    with pytest.raises(InPlaceTTTError, match="include padding"):
        padded.crop(3)
    unpadded.crop(3)
    assert unpadded.tokens == [CHUNK - 1]


def test_rows_that_stay_are_not_copied() -> None:
    """Beams that keep their order, as most steps do."""
    stream = FastWeightStream(3, CHUNK)
    read(stream, CHUNK + 2, seed=0)
    held = [stream.state, *stream._open.held]
    stream.select([0, 1, 2])
    assert all(kept is was for kept, was in zip([stream.state, *stream._open.held], held, strict=True))
    stream.select([0, 1])
    assert stream.batch == 2 and stream.state is not held[0]

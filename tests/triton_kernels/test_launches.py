"""How much a call launches, what it copies from the host, and the sizes of its groups; nothing here runs a
kernel."""

import itertools
from collections.abc import Callable

import pytest
import torch
from launches import launches

from inplace_ttt.kernels import gram, library, operands, products, schedule
from inplace_ttt.kernels.documents import plan_of
from inplace_ttt.layout import ChunkLayout

CHUNK, D, H = 8, 40, 72
CPU = torch.device("cpu")
# name -> lengths of a document, repeated; tokens in the dual form are up to 51
LENGTHS = {"short": [20], "walked": [56], "cut short": [61], "of all kinds": [3, 8, 20, 61, 56, 70]}
LAYOUTS: dict[str, Callable[[list[int], int], ChunkLayout]] = {
    "packed": lambda lengths, times: ChunkLayout.from_lengths([lengths * times], CHUNK),
    "rows": lambda lengths, times: ChunkLayout.from_lengths([[n] for n in lengths * times], CHUNK),
}


def counted(
    layout: ChunkLayout,
    clip: bool = False,
    start: bool = False,
    keep: bool = False,
    dtype: torch.dtype = torch.bfloat16,
):
    """Names of what forward and backward launch."""
    b, t = layout.batch, layout.length
    z, v, w0, d_out = (torch.ones(*size, dtype=dtype) for size in ((b, t, H), (b, t, D), (D, H), (b, t, D)))
    state = torch.ones(b, D, H) if start else None
    given = (z, v, w0, state, torch.tensor(30.0) if clip else None, layout.spans, CHUNK, 0.3, keep)
    d_state = torch.ones(b, D, H) if keep else None
    with launches() as forward:
        library.fast_weight._init_fn(*given)
    with launches() as backward:
        library.fast_weight_backward._init_fn(d_out, d_state, *given, True)
    return forward, backward


@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_documents_do_not_count(lengths: str, kind: str, clip: bool) -> None:
    few, many = (counted(LAYOUTS[kind](LENGTHS[lengths], times), clip) for times in (4, 64))
    assert few == many
    assert len(many[0]) <= 16 and len(many[1]) <= 36, many


@pytest.mark.parametrize(("start", "keep"), [(True, False), (False, True), (True, True)])
def test_nor_with_states(start: bool, keep: bool) -> None:
    few, many = (counted(LAYOUTS["rows"]([3, 61], times), True, start, keep) for times in (2, 32))
    assert few == many and len(many[0]) + len(many[1]) <= 56, many


def test_nothing_is_made_of_host_data_a_second_time() -> None:
    """A tensor made of numbers of the host, and a number read back from the device, are what the host waits
    for."""
    waits = {"lift_fresh", "_local_scalar_dense", "_pin_memory", "scalar_tensor", "nonzero", "masked_select"}
    for clip, start, keep in itertools.product((False, True), repeat=3):
        layouts = [ChunkLayout.from_lengths([[20, 45, 3]], CHUNK) for _ in range(2)]
        counted(layouts[0], clip, start, keep)  # the first of these documents
        named = {name for names in counted(layouts[1], clip, start, keep, torch.bfloat16) for name in names}
        assert not named & waits, named


def test_tables_are_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run them once before"):
        schedule.to_device([1], torch.device("cuda"))


@pytest.mark.parametrize("chunk", [64 * 300, 5])
def test_the_grid_of_chunk_norms_is_one_axis(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third axis of a grid end at 65,535, which chunks of 16,384 tokens and tiles of 64
    pass."""
    grids = []
    monkeypatch.setattr(
        type(gram.squared_norms_kernel),
        "__getitem__",
        lambda kernel, grid: grids.append(grid) or (lambda *a, **k: None),
    )
    rows = torch.ones(2 * chunk, 1)
    gram.squared_norms(rows, rows, torch.tensor([0, chunk]), chunk)
    assert all(len(grid) == 1 and grid[0] < 2**31 for grid in grids) and grids


def slots_of(bytes_: int, tokens: int, chunk: int, d: int, h: int) -> int:
    return operands._room(tokens // chunk, bytes_ // (2 * d * h), chunk, d, h, 132)


@pytest.mark.parametrize(
    ("d", "h"), [(576, 1536), (2048, 6144), (2560, 9728), (4096, 14336), (40, 72), (8192, 29568)]
)
@pytest.mark.parametrize("chunk", [100, 256, 512, 1024, 4096])
def test_groups_take_what_fits_and_fill_waves(chunk: int, d: int, h: int) -> None:
    room = slots_of(operands.SLOTS_BYTES, 32768, chunk, d, h)
    fit = max(operands.SLOTS_BYTES // (2 * d * h), 1)
    assert 1 <= room <= max(fit, 1)
    assert room == 32768 // chunk or room > fit // 2
    tiles = [-(-chunk // 128) * -(-width // 256) for width in (d, h)]
    idle = [
        sum(-(-count * n // 132) * 132 - count * n for n in tiles) / (count * sum(tiles))
        for count in (room, 4)
    ]
    if 4 <= fit < 32768 // chunk:
        assert idle[0] <= idle[1] + 1e-9, "groups of 4 would leave less of the GPU idle"


@pytest.mark.parametrize("room", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(("has_start", "hands_on"), itertools.product((False, True), repeat=2))
def test_every_chunk_is_read_once_and_every_step_taken_once(
    room: int, has_start: bool, hands_on: bool
) -> None:
    layout = ChunkLayout((((0, 70), (70, 79), (80, 160)), (), ((0, 64), (64, 67)), ((5, 8),)), 161, CHUNK)
    plan = plan_of(layout.spans, layout.batch, layout.length, CHUNK, 0, has_start, hands_on)
    for made in (schedule.reads(plan, hands_on, room, 3, CPU), schedule.writes(plan, True, room, 3, CPU)):
        assert all(
            launch.slots <= room and launch.bounds[-1] == len(launch.table) and 1 <= launch.splits <= 3
            for launch in made
        )
        spans = sorted(span[:2] for launch in made for span in products._chunks(launch.runs))
        assert len({*spans}) == len(spans)
        for launch in made:
            slots = sorted(span[2] for span in products._chunks(launch.runs))
            assert slots == list(range(launch.slots))
    wanted = [
        (start, min(CHUNK, d.stop - start))
        for d in plan.documents
        for start in range(d.span(d.read_from, 1)[0], d.stop, CHUNK)
    ]
    found = sorted(
        span[:2]
        for launch in schedule.reads(plan, hands_on, room, 3, CPU)
        for span in products._chunks(launch.runs)
    )
    assert found == sorted(wanted)
    steps = sum(launch.steps for launch in schedule.writes(plan, True, room, 3, CPU))
    assert steps == sum(document.chunks for document in plan.documents) + sum(
        -(-(b - a) // CHUNK) for a, b in plan.outside
    )


def test_a_document_that_a_group_cuts_goes_on_from_what_it_left() -> None:
    layout = ChunkLayout.from_lengths([[80, 80], [80, 80]], CHUNK)
    plan = plan_of(layout.spans, 2, 160, CHUNK, 0, False, True)
    for made in (schedule.reads(plan, True, 4, 2, CPU), schedule.writes(plan, False, 4, 2, CPU)):
        left = None
        for launch in made:
            rows: list[list[int]] = launch.table.tolist()
            sources, targets = (
                [row[column] for row in rows if row[column] >= plan.batch] for column in (7, 8)
            )
            assert sources == ([] if left is None else [left])
            resumed = bool(sources) and rows[0][8] == sources[0]
            assert len(targets) <= 1 and (resumed or not {*sources} & {*targets}), (
                "two stretches share a carry in one launch"
            )
            left = targets[0] if targets else None
        assert left is None


def test_a_run_alone_is_one_product_and_so_are_runs_that_fill() -> None:
    runs = [schedule.Run(0, 512, 0, 1), schedule.Run(512, 1536, 1, 2)]
    assert (
        products._fills(runs[:1], 8, 132)
        and products._fills(runs, 256, 1)
        and not products._fills(runs, 256, 132)
    )

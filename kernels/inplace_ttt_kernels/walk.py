"""The walk: a running sum of one product per chunk, held in registers, of which every intermediate value is written once.

For A [N, d] and B [N, h] over the chunks j of one document,

    S_{j+1} = S_j + c_j A_jᵀ B_j           float32, one (d, h) tile a program from the first chunk to the last
    slot_q  = base + scale · S_q           in the dtype of the inputs

Forward A is the targets, B the keys: S is the state and a slot is the weight that a chunk reads. Backward, from the last
chunk to the first, A is the outputs' gradient: S is the gradient of the state and a slot what a chunk's write gets. A
delta never reaches memory, and S only where a walk stops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .support import has_tensor_copies
from .tuning import Tile, capability, run_tuned, tiles


@triton.jit
def _threshold(number, row, column, BD: tl.constexpr, BH: tl.constexpr):
    """A number in [0, 2^16) for each entry of a tile, from its place and the chunk's number alone: multiply-shift hashing."""
    rows = (row + tl.arange(0, BD)).to(tl.uint32) * 0x9E3779B1 + number.to(tl.uint32) * 0x85EBCA77
    rows = (rows ^ (rows >> 15)) * 0xC2B2AE3D
    rows = (rows ^ (rows >> 13)) | 1
    columns = (column + tl.arange(0, BH)).to(tl.uint32) * 0x27D4EB2F + 0x165667B1
    columns = (columns ^ (columns >> 15)) * 0x9E3779B1
    return (rows[:, None] * (columns ^ (columns >> 13))[None, :]) >> 16


@triton.jit
def _dithered(x, threshold, DTYPE: tl.constexpr):
    """float32 rounded to the grid of DTYPE, up with the probability of the part that is cut off: right on average.

    What lies on the grid stays, as do infinities and NaN. float16 below its normal range is rounded to nearest.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE.is_bf16():  # noqa: SIM108
        raised = (bits + threshold) & 0xFFFF0000
    else:
        raised = (bits + (threshold >> 3)) & 0xFFFFE000
    return tl.where(x == x, raised, bits).to(tl.float32, bitcast=True)


@triton.jit
def _put_part(
    sums, slots, base, slot, number, row, column, d, h, scale,
    HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, DITHER: tl.constexpr, BY_TILE: tl.constexpr, DTYPE: tl.constexpr,
    BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    x = scale * sums
    rows, columns = row + tl.arange(0, BD), column + tl.arange(0, BH)
    inside = (rows < d)[:, None] & (columns < h)[None, :]
    at = rows.to(tl.int64)[:, None] * h + columns[None, :]
    if HAS_BASE:
        if BASE_BY_TILE:
            x += base.load([row, column]).to(tl.float32)
        else:
            x += tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    if DITHER:
        x = _dithered(x, _threshold(number, row, column, BD, BH), DTYPE)
    if BY_TILE:
        slots.store([slot, row, column], x.to(DTYPE).reshape(1, BD, BH))
    else:
        tl.store(slots + slot.to(tl.int64) * d * h + at, x.to(DTYPE), mask=inside)


@triton.jit
def _put(
    sums, slots, base, slot, number, row, column, d, h, scale,
    HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, DITHER: tl.constexpr, BY_TILE: tl.constexpr, DTYPE: tl.constexpr,
    BD: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write base + scale · sums to a slot in column parts, each of which needs registers and shared memory for itself alone."""
    if PARTS == 1:
        _put_part(
            sums, slots, base, slot, number, row, column, d, h, scale, HAS_BASE, BASE_BY_TILE, DITHER, BY_TILE, DTYPE, BD, BH
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BH // 2
        left, right = sums.reshape(BD, 2, HALF).permute(0, 2, 1).split()
        _put(
            left, slots, base, slot, number, row, column, d, h, scale,
            HAS_BASE, BASE_BY_TILE, DITHER, BY_TILE, DTYPE, BD, HALF, PARTS // 2,
        )  # fmt: skip
        _put(
            right, slots, base, slot, number, row, column + HALF, d, h, scale,
            HAS_BASE, BASE_BY_TILE, DITHER, BY_TILE, DTYPE, BD, HALF, PARTS // 2,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["first", "step", "stop", "chunk", "steps", "n_slots", "number", "direction", "lead", "loads", "keeps", "scale"]
)
def walk_kernel(
    a, b, start, carry, slots, base, factors,
    first, step, stop, chunk, steps, n_slots, number, direction, lead, loads, keeps, scale,
    d, h, a_stride, b_stride,
    HAS_SLOTS: tl.constexpr, HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, DITHER: tl.constexpr, CLIPPED: tl.constexpr,
    BY_TILE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BD: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: the (BD, BH) tile of S through `steps` chunks. Arguments as in `walk`; a, b and slots are descriptors
    where BY_TILE, base where BASE_BY_TILE. One flat loop over all chunks keeps the pipeline of loads full from one to the next."""
    tiles_d = tl.cdiv(d, BD)
    row, column = tl.program_id(0) % tiles_d * BD, tl.program_id(0) // tiles_d * BH
    rows, columns = row + tl.arange(0, BD), column + tl.arange(0, BH)
    inside = (rows < d)[:, None] & (columns < h)[None, :]
    at = rows.to(tl.int64)[:, None] * h + columns[None, :]  # 64 bits: d · h and token · stride may pass 2^31
    deep = tl.arange(0, BK)
    if not BY_TILE:
        a_at = rows[:, None] + deep.to(tl.int64)[None, :] * a_stride  # already transposed, so that it goes to shared memory as it is
        b_at = deep.to(tl.int64)[:, None] * b_stride + columns[None, :]

    sums = tl.zeros((BD, BH), tl.float32)
    if loads:
        sums = tl.load(start + at, mask=inside, other=0.0)
    if HAS_SLOTS:  # noqa: SIM102 (known to the compiler, `lead` is not)
        if lead:
            slot = tl.where(direction > 0, 0, n_slots - 1)
            _put(
                sums, slots, base, slot, number, row, column, d, h, scale,
                HAS_BASE, BASE_BY_TILE, DITHER, BY_TILE, DTYPE, BD, BH, PARTS,
            )  # fmt: skip
    if CLIPPED:
        delta = tl.zeros((BD, BH), tl.float32)
    token = first.to(tl.int64)
    k = 0
    done = 0
    for _ in range(steps * tl.cdiv(chunk, BK)):
        if BY_TILE:  # rows from `stop` on read zero
            a_tile = a.load([(token + k).to(tl.int32), row]).T
            b_tile = b.load([(token + k).to(tl.int32), column])
        else:
            real = (k + deep < chunk) & (token + k + deep < stop)
            a_tile = tl.load(a + (token + k) * a_stride + a_at, mask=(rows < d)[:, None] & real[None, :], other=0.0)
            b_tile = tl.load(b + (token + k) * b_stride + b_at, mask=real[:, None] & (columns < h)[None, :], other=0.0)
        is_last = k + BK >= chunk
        if CLIPPED:
            delta = tl.dot(a_tile, b_tile, delta, input_precision=PRECISION)
            if is_last:
                sums += tl.load(factors + number + done) * delta
                delta = tl.zeros((BD, BH), tl.float32)
        else:
            sums = tl.dot(a_tile, b_tile, sums, input_precision=PRECISION)
        if HAS_SLOTS:
            place = done + lead
            if is_last & (place < n_slots):
                slot = tl.where(direction > 0, place, n_slots - 1 - place)
                _put(
                    sums, slots, base, slot, number + place, row, column, d, h, scale,
                    HAS_BASE, BASE_BY_TILE, DITHER, BY_TILE, DTYPE, BD, BH, PARTS,
                )  # fmt: skip
        token = tl.where(is_last, token + step, token)
        done = tl.where(is_last, done + 1, done)
        k = tl.where(is_last, 0, k + BK)
    if keeps:
        tl.store(carry + at, sums, mask=inside)


def walk(
    a: Tensor,
    b: Tensor,
    carry: Tensor,
    slots: Tensor | None,
    *,
    first: int,
    stop: int,
    chunk: int,
    steps: int,
    backward: bool = False,
    start: Tensor | None = None,
    lead: bool = False,
    number: int = 0,
    keeps: bool = True,
    scale: float = 1.0,
    base: Tensor | None = None,
    dither: bool = False,
    factors: Tensor | None = None,
) -> None:
    """Walk `steps` chunks of one document and write the slots on the way.

    a [N, d], b [N, h]: rows of one dtype, each row contiguous. carry [d, h] float32: S after the last step, if `keeps`.
    slots [n, d, h]: the first n values of base + scale · S, after each step, and before the first one too with `lead`; in
    the order of the tokens, also `backward`.
    first, stop, chunk: the first token of the first chunk, the document's end, tokens a chunk; only the last chunk of a
    document may be cut short by its end. start [d, h]: S before the first step (`carry` to go on), None for zero.
    base [d, h]: W0, or a float32 matrix. dither: stochastic rounding to 16 bits. number: of the first chunk in
    its document; it indexes `factors` float32 (c_j), and tells the dither of one chunk from that of the next.
    """
    assert a.stride(1) == b.stride(1) == 1 and a.dtype == b.dtype
    assert all(x is None or x.is_contiguous() for x in (carry, start, slots, base))
    d, h = carry.shape
    written = 0 if slots is None else slots.shape[0]
    assert written <= steps + lead
    n, dtype = a.shape[0], getattr(tl, str(a.dtype).removeprefix("torch."))
    inputs = [x for x in (a, b, slots) if x is not None]
    copies = a.dtype != torch.float32 and has_tensor_copies(a.device) and all(_is_aligned(x) for x in inputs)

    def launch(tile: Tile) -> None:
        by_tile = copies and chunk % tile.depth == 0 and n < 2**31
        base_by_tile = by_tile and base is not None and base.dtype == a.dtype and _is_aligned(base)
        part = tile.columns // tile.parts
        if by_tile:
            given = [
                TensorDescriptor(a, [stop, d], list(a.stride()), [tile.depth, tile.rows]),
                TensorDescriptor(b, [stop, h], list(b.stride()), [tile.depth, tile.columns]),
                None if slots is None else TensorDescriptor.from_tensor(slots, [1, tile.rows, part]),
            ]
        else:
            given = [a, b, slots]
        walk_kernel[(triton.cdiv(d, tile.rows) * triton.cdiv(h, tile.columns),)](
            given[0], given[1], carry if start is None else start, carry, given[2],
            TensorDescriptor.from_tensor(base, [tile.rows, part]) if base_by_tile else base, factors,
            first, -chunk if backward else chunk, stop, chunk, steps, written, number, -1 if backward else 1, int(lead),
            int(start is not None), int(keeps), scale, d, h, a.stride(0), b.stride(0),
            HAS_SLOTS=slots is not None, HAS_BASE=base is not None, BASE_BY_TILE=base_by_tile, DITHER=dither and a.dtype != torch.float32,
            CLIPPED=factors is not None, BY_TILE=by_tile, DTYPE=dtype, PRECISION="ieee" if a.dtype == torch.float32 else "tf32",
            BD=tile.rows, BH=tile.columns, BK=tile.depth, PARTS=tile.parts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    is_large = factors is not None or (base is not None and base.dtype != a.dtype)  # a float32 base takes as much as a sum
    candidates = tiles(a.dtype, capability(a.device), two_sums=is_large)
    writes_every = None if slots is None else chunk.bit_length()
    key = ("walk", a.device, a.dtype, d, h, writes_every, None if base is None else base.dtype, factors is None, copies)
    run_tuned(key, candidates, launch, repeatable=start is not carry, device=a.device)


def _is_aligned(x: Tensor) -> bool:
    """Whether a descriptor can describe it: 16-byte rows and start."""
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])

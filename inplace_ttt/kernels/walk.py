"""The walk: a running sum of one product per chunk, held in registers, of which every intermediate value is
written once.

For A [N, d] and B [N, h] over the chunks j of one document,

    S_{j+1} = S_j + c_j A_jᵀ B_j           float32, one (d, h) tile a program from the first chunk to the last
    slot_q  = base + scale · S_q           in the dtype of the inputs

Forward A is the targets, B the keys: S is the state and a slot is the weight that a chunk reads. Backward,
from the last chunk to the first, A is the outputs' gradient: S is the gradient of the state and a slot what a
chunk's write gets, times the write's c_j. A delta never reaches memory, and S only where a walk stops. One
launch walks a list of stretches of documents, each program the same tile of one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .schedule import FIELDS, Launch
from .support import has_tensor_copies
from .tuning import Tile, capability, run_tuned, tiles


@triton.jit
def _places(matrix, rows, columns, d, h):
    """Where the entries of a matrix [d, h] of several lie; 64 bits, since their product may pass 2^31."""
    return (matrix.to(tl.int64) * d + rows)[:, None] * h + columns[None, :]


@triton.jit
def _threshold(number, row, column, BD: tl.constexpr, BH: tl.constexpr):
    """A number in [0, 2^16) for each entry of a tile, from its place and the chunk's number alone:
    multiply-shift hashing."""
    rows = (row + tl.arange(0, BD)).to(tl.uint32) * 0x9E3779B1 + number.to(tl.uint32) * 0x85EBCA77
    rows = (rows ^ (rows >> 15)) * 0xC2B2AE3D
    rows = (rows ^ (rows >> 13)) | 1
    columns = (column + tl.arange(0, BH)).to(tl.uint32) * 0x27D4EB2F + 0x165667B1
    columns = (columns ^ (columns >> 15)) * 0x9E3779B1
    return (rows[:, None] * (columns ^ (columns >> 13))[None, :]) >> 16


@triton.jit
def _dithered(x, threshold, DTYPE: tl.constexpr):
    """float32 rounded to the grid of DTYPE, up with the probability of the part that is cut off: right on
    average.

    What lies on the grid stays, as do infinities and NaN. float16 below its normal range is rounded to
    nearest.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE.is_bf16():  # noqa: SIM108
        raised = (bits + threshold) & 0xFFFF0000
    else:
        raised = (bits + (threshold >> 3)) & 0xFFFFE000
    return tl.where(x == x, raised, bits).to(tl.float32, bitcast=True)


@triton.jit
def _base_part(
    base, base_row, row, column, d, h, HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """The base's (BD, BH) part in its own dtype; zero without one, and for a negative base_row."""
    if not HAS_BASE:
        part = tl.zeros((BD, BH), tl.float32)
    elif BASE_BY_TILE:
        part = base.load([row, column])
    else:
        rows, columns = row + tl.arange(0, BD), column + tl.arange(0, BH)
        inside = (rows < tl.where(base_row >= 0, d, 0))[:, None] & (columns < h)[None, :]
        part = tl.load(base + _places(base_row, rows, columns, d, h), mask=inside, other=0.0)
    return part


@triton.jit
def _put_part(
    sums, part, slots, slot, number, row, column, d, h, scale, factor,
    DITHER: tl.constexpr, SCALED: tl.constexpr, BY_TILE: tl.constexpr, DTYPE: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    x = scale * sums + part.to(tl.float32)
    if SCALED:
        x *= factor
    if DITHER:
        x = _dithered(x, _threshold(number, row, column, BD, BH), DTYPE)
    if BY_TILE:
        slots.store([slot, row, column], x.to(DTYPE).reshape(1, BD, BH))
    else:
        rows, columns = row + tl.arange(0, BD), column + tl.arange(0, BH)
        inside = (rows < d)[:, None] & (columns < h)[None, :]
        tl.store(slots + _places(slot, rows, columns, d, h), x.to(DTYPE), mask=inside)


@triton.jit
def _put(
    sums, part, slots, base, slot, base_row, number, row, column, d, h, scale, factor,
    HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, DITHER: tl.constexpr, SCALED: tl.constexpr, BY_TILE: tl.constexpr,
    DTYPE: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write base + scale · sums to a slot in column parts, each of which needs registers and shared memory
    for itself alone.

    part: the base's first part, loaded before.
    """
    if PARTS == 1:
        _put_part(
            sums,
            part,
            slots,
            slot,
            number,
            row,
            column,
            d,
            h,
            scale,
            factor,
            DITHER,
            SCALED,
            BY_TILE,
            DTYPE,
            BD,
            BH,
        )
    else:
        HALF: tl.constexpr = BH // 2
        left, right = sums.reshape(BD, 2, HALF).permute(0, 2, 1).split()
        _put(
            left, part, slots, base, slot, base_row, number, row, column, d, h, scale, factor,
            HAS_BASE, BASE_BY_TILE, DITHER, SCALED, BY_TILE, DTYPE, BD, HALF, PARTS // 2,
        )  # fmt: skip
        later = _base_part(
            base, base_row, row, column + HALF, d, h, HAS_BASE, BASE_BY_TILE, BD, HALF // (PARTS // 2)
        )
        _put(
            right, later, slots, base, slot, base_row, number, row, column + HALF, d, h, scale, factor,
            HAS_BASE, BASE_BY_TILE, DITHER, SCALED, BY_TILE, DTYPE, BD, HALF, PARTS // 2,
        )  # fmt: skip


@triton.jit
def _tiles_by_pointer(
    a, b, token, k, end, row, column, d, h, a_stride, b_stride, BD: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Aᵀ (BD, BK) and B (BK, BH) of the tokens from token + k on, zero from token + end on."""
    rows, columns, deep = row + tl.arange(0, BD), column + tl.arange(0, BH), tl.arange(0, BK)
    real = k + deep < end
    a += (token + k) * a_stride
    b += (token + k) * b_stride
    # already transposed, so that it goes to shared memory as it is
    a_tile = tl.load(
        a + (deep.to(tl.int64) * a_stride)[None, :] + rows[:, None],
        mask=(rows < d)[:, None] & real[None, :],
        other=0.0,
    )
    b_tile = tl.load(
        b + (deep.to(tl.int64) * b_stride)[:, None] + columns[None, :],
        mask=real[:, None] & (columns < h)[None, :],
        other=0.0,
    )
    return a_tile, b_tile


@triton.jit(do_not_specialize=["chunk", "held", "scale"])
def walk_kernel(
    a, b, a_rows, b_rows, table, bounds, start, carry, final, slots, base, factors, total,
    chunk, held, scale, d, h, a_stride, b_stride,
    BACKWARD: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, DITHER: tl.constexpr,
    CLIPPED: tl.constexpr, ADDS: tl.constexpr, HAS_TAIL: tl.constexpr, BY_TILE: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, FIELDS: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: the (BD, BH) tile of S through the stretches of its split, one after the other.

    a, b and slots are descriptors where BY_TILE, base where BASE_BY_TILE; a_rows and b_rows the same rows by
    pointer. One flat loop over a stretch's whole chunks keeps the pipeline of loads full from one chunk to
    the next. HAS_TAIL: a first chunk may be cut short by its document's end; what is past it belongs to
    others, so that no descriptor's edge hides it.
    """
    tiles_d = tl.cdiv(d, BD)
    row, column = tl.program_id(0) % tiles_d * BD, tl.program_id(0) // tiles_d * BH
    split = tl.program_id(1)
    move = -chunk if BACKWARD else chunk
    rows, columns = row + tl.arange(0, BD), column + tl.arange(0, BH)
    for place in range(tl.load(bounds + split), tl.load(bounds + split + 1)):
        entry = table + place * FIELDS
        token, stop, steps = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
        slot, fills, number, factor = (
            tl.load(entry + 3),
            tl.load(entry + 4),
            tl.load(entry + 5),
            tl.load(entry + 6),
        )
        source, target, base_row, adds = (
            tl.load(entry + 7),
            tl.load(entry + 8),
            tl.load(entry + 9),
            tl.load(entry + 10),
        )

        # Addresses and masks hang on what was just loaded: kept from one stretch to the next they would take
        # the loop's registers.
        before = tl.where(source < held, start, carry)
        at = _places(tl.where(source < held, source, source - held), rows, columns, d, h)
        sums = tl.load(
            before + at,
            mask=(rows < d)[:, None] & (columns < tl.where(source >= 0, h, 0))[None, :],
            other=0.0,
        )
        done = steps * 0
        if BY_TILE and HAS_TAIL:  # noqa: SIM102 (known to the compiler, the other is not)
            if (stop - token < chunk) & (steps > 0):
                TAIL: tl.constexpr = 32 if BK > 32 else BK
                for k in range(0, (stop - token).to(tl.int32), TAIL):
                    a_tail, b_tail = _tiles_by_pointer(
                        a_rows,
                        b_rows,
                        token,
                        k,
                        stop - token,
                        row,
                        column,
                        d,
                        h,
                        a_stride,
                        b_stride,
                        BD,
                        BH,
                        TAIL,
                    )
                    sums = tl.dot(a_tail, b_tail, sums, input_precision=PRECISION)
                if HAS_SLOTS:  # noqa: SIM102
                    if fills > 0:
                        c = 1.0
                        if CLIPPED:
                            c = tl.load(factors + factor)
                        part = _base_part(
                            base, base_row, row, column, d, h, HAS_BASE, BASE_BY_TILE, BD, BH // PARTS
                        )
                        _put(
                            sums, part, slots, base, slot, base_row, number, row, column, d, h, scale, c,
                            HAS_BASE, BASE_BY_TILE, DITHER, CLIPPED and BACKWARD, BY_TILE, DTYPE, BD, BH, PARTS,
                        )  # fmt: skip
                done += 1
                token -= chunk
        if CLIPPED and not BACKWARD:
            delta = tl.zeros((BD, BH), tl.float32)
        k = done * 0
        for _ in range((steps - done) * tl.cdiv(chunk, BK)):
            if BY_TILE:
                a_tile = a.load([(token + k).to(tl.int32), row]).T
                b_tile = b.load([(token + k).to(tl.int32), column])
            else:
                end = tl.minimum(chunk, stop - token)
                a_tile, b_tile = _tiles_by_pointer(
                    a_rows, b_rows, token, k, end, row, column, d, h, a_stride, b_stride, BD, BH, BK
                )
            is_last = k + BK >= chunk
            if CLIPPED and not BACKWARD:
                delta = tl.dot(a_tile, b_tile, delta, input_precision=PRECISION)
                if is_last:
                    sums += tl.load(factors + factor + done) * delta
                    delta = tl.zeros((BD, BH), tl.float32)
            else:
                sums = tl.dot(a_tile, b_tile, sums, input_precision=PRECISION)
            if HAS_SLOTS:  # noqa: SIM102
                if is_last & (done < fills):
                    c = 1.0
                    if CLIPPED and BACKWARD:
                        c = tl.load(factors + factor - done)
                    # on its way while the tensor cores are still at the chunk's last product
                    part = _base_part(
                        base, base_row, row, column, d, h, HAS_BASE, BASE_BY_TILE, BD, BH // PARTS
                    )
                    _put(
                        sums, part, slots, base, slot - done if BACKWARD else slot + done, base_row, number + done, row, column, d, h,
                        scale, c, HAS_BASE, BASE_BY_TILE, DITHER, CLIPPED and BACKWARD, BY_TILE, DTYPE, BD, BH, PARTS,
                    )  # fmt: skip
            token = tl.where(is_last, token + move, token)
            done = tl.where(is_last, done + 1, done)
            k = tl.where(is_last, 0, k + BK)

        after = tl.where(target < held, final, carry)
        at = _places(tl.where(target < held, target, target - held), rows, columns, d, h)
        tl.store(
            after + at, sums, mask=(rows < d)[:, None] & (columns < tl.where(target >= 0, h, 0))[None, :]
        )
        if ADDS:
            sum_at = total + _places(split + adds - 1, rows, columns, d, h)
            inside = (rows < d)[:, None] & (columns < tl.where(adds > 0, h, 0))[None, :]
            tl.store(sum_at, tl.load(sum_at, mask=inside, other=0.0) + sums, mask=inside)


@triton.jit(do_not_specialize=["scale"])
def lead_kernel(
    start, slots, base, factors, table, scale, d, h,
    HAS_START: tl.constexpr, HAS_BASE: tl.constexpr, DITHER: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
    BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One program: a (BD, BH) tile of a slot that holds what its walk starts from; table [leads, 5]."""
    entry = table + tl.program_id(1) * 5
    slot, source, base_row, number, place = (
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    )  # fmt: skip
    tiles_d = tl.cdiv(d, BD)
    row, column = tl.program_id(0) % tiles_d * BD, tl.program_id(0) // tiles_d * BH
    sums = _base_part(start, source, row, column, d, h, HAS_START, False, BD, BH)
    part = _base_part(base, base_row, row, column, d, h, HAS_BASE, False, BD, BH)
    c = 1.0
    if SCALED:
        c = tl.load(factors + place)
    _put_part(
        sums, part, slots, slot, number, row, column, d, h, scale, c, DITHER, SCALED, False, DTYPE, BD, BH
    )


def walk(
    a: Tensor,
    b: Tensor,
    launch: Launch,
    *,
    chunk: int,
    shape: tuple[int, int],
    slots: Tensor | None = None,
    carry: Tensor | None = None,
    start: Tensor | None = None,
    final: Tensor | None = None,
    total: Tensor | None = None,
    base: Tensor | None = None,
    factors: Tensor | None = None,
    scale: float = 1.0,
    dither: bool = False,
) -> None:
    """Walk the stretches of a launch and write their slots on the way.

    a [N, d], b [N, h]: rows of one dtype, each row contiguous. slots [n, d, h]. start, carry, final [·, d, h]
    float32: what the stretches start from and leave, numbered as in `schedule`. total [splits, d, h] float32:
    each split adds the sums of the documents that end in it. base [d, h]: W0, or float32 matrices [B, d, h].
    dither: stochastic rounding to 16 bits. factors
    float32: c_j of every write of the call.
    """
    d, h = shape
    assert a.stride(1) == b.stride(1) == 1 and a.dtype == b.dtype and a.shape[0] < 2**31
    assert all(x is None or x.is_contiguous() for x in (slots, carry, start, final, total, base))
    dtype, dither = getattr(tl, str(a.dtype).removeprefix("torch.")), dither and a.dtype != torch.float32
    none = torch.empty(0, dtype=torch.float32, device=a.device)
    start, carry, final = (none if x is None else x for x in (start, carry, final))
    if launch.leads is not None:
        grid = (triton.cdiv(d, 32) * triton.cdiv(h, 64), len(launch.leads))
        lead_kernel[grid](
            start, slots, base, factors, launch.leads, scale, d, h, HAS_START=start.numel() > 0, HAS_BASE=base is not None,
            DITHER=dither, SCALED=factors is not None and launch.backward, DTYPE=dtype, BD=32, BH=64,
        )  # fmt: skip
    if not launch.steps and not launch.moves:
        return
    given = [x for x in (a, b, slots) if x is not None]
    can_copy = a.dtype != torch.float32 and has_tensor_copies(a.device) and all(_is_aligned(x) for x in given)
    copies = can_copy and chunk % tiles(a.dtype, capability(a.device))[0].depth == 0

    def run(tile: Tile) -> None:
        base_by_tile = (
            copies and base is not None and base.dim() == 2 and base.dtype == a.dtype and _is_aligned(base)
        )
        part = tile.columns // tile.parts
        described = [a, b, slots]
        if copies:
            described = [
                TensorDescriptor.from_tensor(a, [tile.depth, tile.rows]),
                TensorDescriptor.from_tensor(b, [tile.depth, tile.columns]),
                None if slots is None else TensorDescriptor.from_tensor(slots, [1, tile.rows, part]),
            ]
        by_pointer = not copies or launch.has_tail
        walk_kernel[(triton.cdiv(d, tile.rows) * triton.cdiv(h, tile.columns), launch.splits)](
            described[0] if copies else None, described[1] if copies else None, a if by_pointer else None, b if by_pointer else None,
            launch.table, launch.bounds, start, carry, final, described[2],
            TensorDescriptor.from_tensor(base, [tile.rows, part]) if base_by_tile else base, factors, total,
            chunk, launch.batch, scale, d, h, a.stride(0), b.stride(0),
            BACKWARD=launch.backward, HAS_SLOTS=slots is not None, HAS_BASE=base is not None, BASE_BY_TILE=base_by_tile, DITHER=dither,
            CLIPPED=factors is not None, ADDS=total is not None, HAS_TAIL=launch.has_tail, BY_TILE=copies, DTYPE=dtype,
            PRECISION="ieee" if a.dtype == torch.float32 else "tf32", FIELDS=FIELDS, BD=tile.rows, BH=tile.columns, BK=tile.depth,
            PARTS=tile.parts, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    is_large = (factors is not None and not launch.backward) or (base is not None and base.dtype != a.dtype)
    candidates = tiles(a.dtype, capability(a.device), two_sums=is_large, by_pointer=not copies)
    writes_every = None if slots is None else chunk.bit_length()
    key = (
        "walk",
        a.device,
        a.dtype,
        d,
        h,
        writes_every,
        None if base is None else base.dtype,
        factors is None,
        copies,
    )
    run_tuned(
        key,
        candidates,
        run,
        repeatable=launch.is_first,
        restore=None if total is None else total.zero_,
        device=a.device,
    )


def _is_aligned(x: Tensor) -> bool:
    """Whether a descriptor can describe it: 16-byte rows and start."""
    return (
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
    )

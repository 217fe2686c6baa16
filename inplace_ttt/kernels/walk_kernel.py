"""The kernels of the walk. They hold a running sum, of one product per chunk, in registers.

`walk` launches them and documents the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _places(matrix, rows, columns, d, h):
    """Returns the offsets of entries in one of several matrices [d, h].

    The offsets have 64 bits, because they may exceed 2^31.
    """
    return (matrix.to(tl.int64) * d + rows)[:, None] * h + columns[None, :]


@triton.jit
def _threshold(number, row, column, BD: tl.constexpr, BH: tl.constexpr):
    """Returns a number in [0, 2^16) for each entry of a tile, by multiply-shift hashing.

    It depends only on the entry's place and the chunk's number.
    """
    rows = (row + tl.arange(0, BD)).to(tl.uint32) * 0x9E3779B1 + number.to(tl.uint32) * 0x85EBCA77
    rows = (rows ^ (rows >> 15)) * 0xC2B2AE3D
    rows = (rows ^ (rows >> 13)) | 1
    columns = (column + tl.arange(0, BH)).to(tl.uint32) * 0x27D4EB2F + 0x165667B1
    columns = (columns ^ (columns >> 15)) * 0x9E3779B1
    return (rows[:, None] * (columns ^ (columns >> 13))[None, :]) >> 16


@triton.jit
def _dithered(x, threshold, DTYPE: tl.constexpr):
    """Rounds float32 to DTYPE by stochastic rounding, which is exact on average.

    A number is rounded up with a probability equal to the part that is cut off, in steps of DTYPE. Numbers of
    DTYPE, infinities and NaN do not change. float16 below its normal range is rounded to nearest.
    """
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE.is_bf16():  # noqa: SIM108
        raised = (bits + threshold) & 0xFFFF0000
    else:
        raised = (bits + (threshold >> 3)) & 0xFFFFE000
    return tl.where(x == x, raised, bits).to(tl.float32, bitcast=True)


@triton.jit
def _base_part(
    base, base_row, row, column, d, h,
    HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """Returns the base's (BD, BH) part in its own dtype; zero without a base or for a negative base_row."""
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
    DITHER: tl.constexpr, SCALED: tl.constexpr, BY_TILE: tl.constexpr, DTYPE: tl.constexpr,
    BD: tl.constexpr, BH: tl.constexpr,
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
    HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr, DITHER: tl.constexpr, SCALED: tl.constexpr,
    BY_TILE: tl.constexpr, DTYPE: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes base + scale · sums to a slot in column parts.

    So only one part at a time needs registers and shared memory. `part` is the base's first part, which is
    already loaded.
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
    a, b, token, k, end, row, column, d, h, a_stride, b_stride,
    BD: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Returns Aᵀ (BD, BK) and B (BK, BH) of the tokens from token + k on, zero from token + end on."""
    rows, columns, deep = row + tl.arange(0, BD), column + tl.arange(0, BH), tl.arange(0, BK)
    real = k + deep < end
    a += (token + k) * a_stride
    b += (token + k) * b_stride
    # the transposed load can be copied to shared memory unchanged
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
    BACKWARD: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BASE: tl.constexpr, BASE_BY_TILE: tl.constexpr,
    DITHER: tl.constexpr, CLIPPED: tl.constexpr, ADDS: tl.constexpr, HAS_TAIL: tl.constexpr,
    BY_TILE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
    BD: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: a (BD, BH) tile of S for all stretches of its split, one after the other.

    a, b and slots are descriptors if BY_TILE is set, and base is one if BASE_BY_TILE is set. a_rows and
    b_rows are the same rows by pointer. One flat loop over a stretch's complete chunks keeps the pipeline of
    loads full from one chunk to the next. With HAS_TAIL, a first chunk may be shorter, because its document
    ends. The rows after it belong to other documents, so a descriptor's bounds do not mask them.
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

        # Addresses and masks depend on values loaded here, per stretch. If the compiler kept them from one
        # stretch to the next, they would occupy registers of the loop.
        before = tl.where(source < held, start, carry)
        at = _places(tl.where(source < held, source, source - held), rows, columns, d, h)
        sums = tl.load(
            before + at,
            mask=(rows < d)[:, None] & (columns < tl.where(source >= 0, h, 0))[None, :],
            other=0.0,
        )
        done = steps * 0
        if BY_TILE and HAS_TAIL:  # noqa: SIM102 (constant at compile time, the other is not)
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
                            HAS_BASE, BASE_BY_TILE, DITHER, CLIPPED and BACKWARD, BY_TILE, DTYPE, BD, BH,
                            PARTS,
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
                    # this load overlaps with the chunk's last product on the tensor cores
                    part = _base_part(
                        base, base_row, row, column, d, h, HAS_BASE, BASE_BY_TILE, BD, BH // PARTS
                    )
                    _put(
                        sums, part, slots, base, slot - done if BACKWARD else slot + done, base_row,
                        number + done, row, column, d, h, scale, c, HAS_BASE, BASE_BY_TILE, DITHER,
                        CLIPPED and BACKWARD, BY_TILE, DTYPE, BD, BH, PARTS,
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
    HAS_START: tl.constexpr, HAS_BASE: tl.constexpr, DITHER: tl.constexpr, SCALED: tl.constexpr,
    DTYPE: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One program: a (BD, BH) tile of a slot that holds the start of its walk; table [leads, 5]."""
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

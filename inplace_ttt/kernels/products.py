"""Many small products in one launch. Each product, called a problem, belongs to one document or chunk.

    read      out[t] = rows[t] · M                      M is the problem's own matrix
    scores    out[i, j] = x[t_i] · y[t_j]               over all pairs of the problem's tokens
    combine   out[t_i] = Σ_j scores[i, j] rows[t_j]

Consecutive chunks of one document form a batched product. cuBLAS computes a batched product faster if the
product fills the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .schedule import Run, to_device
from .support import INTERPRETED, multiprocessors

_CUBLAS_TILE = (128, 256)
_WASTE = 1.25
"""Largest ratio of waves, cuBLAS products over one launch, at which cuBLAS is used."""


@dataclass(frozen=True)
class Shape:
    """A tile of `side` rows and columns and depth `deep`, with its warps and pipeline stages."""

    side: int
    deep: int
    warps: int
    stages: int


def shape_for(dtype: torch.dtype, interpreted: bool = INTERPRETED) -> Shape:
    if interpreted:
        return Shape(32, 32, 4, 1)
    return Shape(64, 16, 4, 2) if dtype == torch.float32 else Shape(128, 32, 8, 3)


@dataclass(frozen=True)
class Problems:
    """The products of one launch.

    Attributes:
        tiles: [row tiles, 4] int32 on the device. The four numbers are the problem's first token, the index
            of its matrix (or of its first row of scores), its number of tokens, and the index of the row
            tile.
        longest: Tokens of the longest problem.
        total: Tokens of all problems.
    """

    tiles: Tensor
    longest: int
    total: int


@lru_cache(maxsize=256)
def problems(spans: tuple[tuple[int, int, int], ...], side: int, device: torch.device) -> Problems:
    """Returns the problems for spans of (first token, tokens, matrix)."""
    rows = [
        (start, matrix, length, tile) for start, length, matrix in spans for tile in range(-(-length // side))
    ]
    numbers = to_device([number for row in rows for number in row], device).view(-1, 4)
    return Problems(numbers, max(length for _, length, _ in spans), sum(length for _, length, _ in spans))


@triton.jit(do_not_specialize=["alpha", "chunk"])
def products_kernel(
    a, b, c, tiles, factors, columns, deep, alpha, chunk, a_lead, a_m, a_k, b_lead, b_k, b_n, c_lead,
    MODE: tl.constexpr, REACH: tl.constexpr, EARLIER: tl.constexpr, MIRRORED: tl.constexpr,
    HAS_FACTORS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program: a (B, B) tile of one problem. MODE: read 0, scores 1, combine 2.

    REACH sets the tokens that a row tile sums over: 0 all, 1 up to its own tokens, 2 from its own tokens on.
    With EARLIER, a score is kept only if the column's chunk comes before the row's chunk. With MIRRORED, the
    transpose of such scores is added.
    """
    columns_of = tl.cdiv(columns, B)
    entry = tiles + tl.program_id(0) // columns_of * 4
    token, matrix = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64)
    length, i = tl.load(entry + 2), tl.load(entry + 3)
    j = tl.program_id(0) % columns_of
    if MODE == 1:
        columns, a_row, b_row, c_row = length, token, token, matrix
    elif MODE == 2:
        deep, a_row, b_row, c_row = length, matrix, token, token
    else:
        a_row, b_row, c_row = token, matrix, token
    wanted = j * B < columns
    if EARLIER:
        wanted = j <= i
    if wanted:
        rows, cols, ks = i * B + tl.arange(0, B), j * B + tl.arange(0, B), tl.arange(0, BK)
        first, last = 0 * deep, deep
        if REACH == 1:
            last = tl.minimum(deep, (i + 1) * B)
        if REACH == 2:
            first = i * B
        sums = tl.zeros((B, B), tl.float32)
        left_rows, left_last = length, last
        if MODE == 2:  # scores are loaded as full vectors, for which they are padded with zeros
            left_last = tl.cdiv(last, 16) * 16
            if REACH == 2:
                left_rows, left_last = tl.cdiv(length, 16) * 16, last
        for k in range(first, last, BK):
            at = (k + ks).to(tl.int64)
            left = tl.load(
                a + a_row * a_lead + rows.to(tl.int64)[:, None] * a_m + at[None, :] * a_k,
                mask=(rows < left_rows)[:, None] & (k + ks < left_last)[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                b + b_row * b_lead + at[:, None] * b_k + cols.to(tl.int64)[None, :] * b_n,
                mask=(k + ks < last)[:, None] & (cols < columns)[None, :], other=0.0,
            )  # fmt: skip
            sums = tl.dot(left, right, sums, input_precision=PRECISION)
        sums *= alpha
        if HAS_FACTORS:
            sums *= tl.load(factors + matrix // chunk)
        if EARLIER:
            sums = tl.where((rows // chunk)[:, None] > (cols // chunk)[None, :], sums, 0.0)
        width = tl.cdiv(length, 16) * 16 if MODE == 1 else columns
        kept = (rows < length)[:, None] & (cols < width)[None, :]
        out = c + (c_row + rows.to(tl.int64))[:, None] * c_lead + cols[None, :]
        if MIRRORED:
            turned = sums.T
            if i == j:
                sums += turned
            else:
                there = c + (c_row + cols.to(tl.int64))[:, None] * c_lead + rows[None, :]
                tl.store(
                    there,
                    turned.to(c.dtype.element_ty),
                    mask=(cols < length)[:, None] & (rows < width)[None, :],
                )
        if ADD:
            sums += tl.load(out, mask=kept, other=0.0).to(tl.float32)
        tl.store(out, sums.to(c.dtype.element_ty), mask=kept)


def _launch(
    a: Tensor, b: Tensor, out: Tensor, which: Problems, columns: int, deep: int, strides: tuple[int, ...], *,
    mode: int, reach: int = 0, earlier: bool = False, mirrored: bool = False, alpha: float = 1.0,
    chunk: int = 1, factors: Tensor | None = None, add: bool = False,
) -> None:  # fmt: skip
    tile = shape_for(a.dtype)
    products_kernel[(len(which.tiles) * triton.cdiv(columns, tile.side),)](
        a, b, out, which.tiles, factors, columns, deep, alpha, chunk, *strides, out.stride(0),
        MODE=mode, REACH=reach, EARLIER=earlier, MIRRORED=mirrored, HAS_FACTORS=factors is not None, ADD=add,
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32", B=tile.side, BK=tile.deep,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def multiply(rows: Tensor, matrices: Tensor, runs: Sequence[Run], out: Tensor, *, add: bool = False) -> None:
    """Sets out[t] = rows[t] · matrices[slot] for the tokens of the runs, or adds to it.

    rows [N, K], matrices [n, K, M], out [N, M].
    """
    if not runs:
        return
    if _fills(runs, matrices.shape[-1], multiprocessors(rows.device)):
        for run in runs:
            given, wanted = (x[run.start : run.stop].unflatten(0, (run.count, -1)) for x in (rows, out))
            if add:
                wanted.baddbmm_(given, matrices[run.slot : run.slot + run.count])
            else:
                torch.bmm(given, matrices[run.slot : run.slot + run.count], out=wanted)
        return
    which = problems(tuple(_chunks(runs)), shape_for(rows.dtype).side, rows.device)
    strides = (rows.stride(0), rows.stride(0), rows.stride(1), *matrices.stride())
    _launch(rows, matrices, out, which, matrices.shape[-1], rows.shape[-1], strides, mode=0, add=add)


def _chunks(runs: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    for run in runs:
        length = (run.stop - run.start) // run.count
        for number in range(run.count):
            yield run.start + number * length, length, run.slot + number


def _fills(runs: Sequence[Run], columns: int, programs: int) -> bool:
    """Returns True if one cuBLAS product per run leaves little of the GPU idle."""
    rows, across = _CUBLAS_TILE
    tiles = [
        run.count * -(-(run.stop - run.start) // run.count // rows) * -(-columns // across) for run in runs
    ]
    return len(runs) == 1 or sum(-(-n // programs) for n in tiles) <= _WASTE * sum(tiles) / programs


def packed(spans: tuple[tuple[int, int], ...], like: Tensor) -> Problems:
    """Returns the problems for spans of (first token, tokens), with their scores one after the other."""
    ends = itertools.accumulate((length for _, length in spans), initial=0)
    return problems(
        tuple((*span, first) for span, first in zip(spans, ends, strict=False)),
        shape_for(like.dtype).side,
        like.device,
    )


Kind = Literal["all", "earlier", "earlier and later"]


def scores(
    x: Tensor, y: Tensor, which: Problems, kind: Kind, *, chunk: int, alpha: float = 1.0,
    factors: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Computes alpha · x yᵀ of each problem's tokens, [total, longest] in x's dtype.

    Args:
        x: Rows [N, n].
        y: Rows [N, n].
        which: The problems.
        kind: "all" computes every score. "earlier" computes a score only if the column's chunk comes before
            the row's chunk. Other scores are zero, and entries beyond the row's own tile are not set.
            "earlier and later" adds the transpose.
        chunk: Tokens per chunk.
        alpha: Factor of all scores.
        factors: A further factor per problem, if each problem is one chunk.

    Returns:
        The scores; rows are padded to a multiple of 16 columns.
    """
    out = torch.empty(which.total, -(-which.longest // 16) * 16, dtype=x.dtype, device=x.device)
    strides = (x.stride(0), x.stride(0), 1, y.stride(0), 1, y.stride(0))
    _launch(
        x, y, out, which, which.longest, x.shape[1], strides, mode=1, earlier=kind != "all",
        mirrored=kind == "earlier and later", alpha=alpha, chunk=chunk, factors=factors,
    )  # fmt: skip
    return out


def combine(
    table: Tensor,
    rows: Tensor,
    which: Problems,
    out: Tensor,
    kind: Kind,
    *,
    transposed: bool = False,
    add: bool = True,
) -> None:
    """Adds to `out` [N, n] the scores (or their transpose) of each problem times its tokens' rows [N, n].

    add: False sets `out` instead.
    """
    reach = (2 if transposed else 1) if kind == "earlier" else 0
    along = (1, table.stride(0)) if transposed else (table.stride(0), 1)
    strides = (table.stride(0), *along, rows.stride(0), rows.stride(0), 1)
    _launch(table, rows, out, which, rows.shape[1], 0, strides, mode=2, reach=reach, add=add)

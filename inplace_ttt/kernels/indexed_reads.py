"""Reads of single keys from different matrices, without copies of the matrices.

A read is a matrix times a vector. Its time is that of loading the matrix from memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .support import INTERPRETED, on_device_of


def tile(interpreted: bool = INTERPRETED) -> tuple[int, int]:
    """Returns the number of outputs of a program, and of inputs per step."""
    return (16, 32) if interpreted else (16, 256)


@triton.jit(do_not_specialize=["scale"])
def indexed_reads_kernel(
    out, z, maps, places, rows, factors, scale, d, r, out_stride, z_stride, map_stride,
    HAS_FACTORS: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One program: BD outputs of one token."""
    token = tl.program_id(1)
    place, row = tl.load(places + token), tl.load(rows + token)
    outputs = tl.program_id(0) * BD + tl.arange(0, BD)
    matrix = maps + row * map_stride + outputs.to(tl.int64)[:, None] * r
    products = tl.zeros((BD, BR), tl.float32)
    for first in range(0, r, BR):
        inputs = first + tl.arange(0, BR)
        keys = tl.load(z + place * z_stride + inputs, mask=inputs < r, other=0.0).to(maps.dtype.element_ty)
        inside = (outputs < d)[:, None] & (inputs < r)[None, :]
        entries = tl.load(matrix + inputs[None, :], mask=inside, other=0.0)
        products += entries.to(tl.float32) * keys.to(tl.float32)[None, :]
    read = scale * tl.sum(products, axis=1)
    if HAS_FACTORS:
        read *= tl.load(factors + row)
    at = out + place * out_stride + outputs
    before = tl.load(at, mask=outputs < d, other=0.0).to(tl.float32)
    tl.store(at, (before + read).to(out.dtype.element_ty), mask=outputs < d)


def add_indexed_reads(
    out: Tensor, z: Tensor, maps: Tensor, places: Tensor, rows: Tensor, factors: Tensor | None, scale: float
) -> None:
    """Adds scale · factor[row] · M[row] z[place] to out[place], in place.

    out [N, d], z [N, r], maps [B, d, r], factors [B, 1, 1] float32 or None; places and rows [n] int64.
    """
    assert out.stride(-1) == z.stride(-1) == 1 and maps[0].is_contiguous()
    (d, r), (outputs, inputs) = maps.shape[1:], tile()
    with on_device_of(z):
        indexed_reads_kernel[(triton.cdiv(d, outputs), len(places))](
            out, z, maps, places.contiguous(), rows.contiguous(), factors, scale, d, r,
            out.stride(0), z.stride(0), maps.stride(0),
            HAS_FACTORS=factors is not None, BD=outputs, BR=inputs, num_warps=4,
        )  # fmt: skip

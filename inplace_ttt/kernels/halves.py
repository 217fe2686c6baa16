"""Splits float32 numbers into sums of two bfloat16 numbers, which keep 16 of the 24 bits.

Tensor cores multiply bfloat16 numbers and accumulate the products in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .support import INTERPRETED, on_device_of

_NUMBERS = 64 if INTERPRETED else 2048


@triton.jit
def halves_kernel(x, high, low, numbers, x_matrix, B: tl.constexpr):
    """One program: B numbers of one matrix."""
    matrix, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * B + tl.arange(0, B)
    given = tl.load(x + matrix * x_matrix + at, mask=at < numbers, other=0.0)
    first = given.to(tl.bfloat16)
    tl.store(high + matrix * numbers + at, first, mask=at < numbers)
    tl.store(low + matrix * numbers + at, (given - first.to(tl.float32)).to(tl.bfloat16), mask=at < numbers)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the high and the low part [n, a, b] bfloat16 of x [n, a, b] float32.

    x is copied first if one of its matrices is not contiguous.
    """
    assert x.dim() == 3 and x.dtype == torch.float32
    x = x if x[:1].is_contiguous() else x.contiguous()
    numbers = x.shape[1] * x.shape[2]
    high, low = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    with on_device_of(x):
        halves_kernel[(triton.cdiv(numbers, _NUMBERS), len(x))](
            x, high, low, numbers, x.stride(0), B=_NUMBERS
        )
    return high, low

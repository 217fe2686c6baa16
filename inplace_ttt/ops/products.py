"""Batched products that accumulate in float32 (float64 for float64), also for factors of lower precision.

Shapes:

    a [n, m, k] · b [n, k, p] = out [n, m, p]    out in the state's dtype
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import triton
from .precision import state_dtype


@dataclass(frozen=True)
class Operand:
    """A matrix [n, ·, ·]: one tensor, or a float32 matrix as the sum of two bfloat16 tensors."""

    parts: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Tensor, beside: torch.dtype) -> Operand:
        """Makes x an operand for products with matrices of dtype `beside`.

        x is split in two parts if a GPU multiplies the parts in bfloat16. Together they hold 16 of float32's
        24 bits, where one bfloat16 tensor would hold 8.
        """
        return cls(triton.halves(x)) if splits(x, beside) else cls((x,))

    @property
    def mT(self) -> Operand:
        return Operand(tuple(x.mT for x in self.parts))

    def rows(self, start: int | None, stop: int | None) -> Operand:
        return Operand(tuple(x[:, start:stop] for x in self.parts))


def splits(x: Tensor, beside: torch.dtype) -> bool:
    """Returns True if float32 x is split in two parts for a product with `beside` here."""
    return x.dtype == torch.float32 and beside == torch.bfloat16 and triton.preferred(x.device, beside)


def product(
    a: Tensor | Operand, b: Tensor | Operand, *, alpha: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Computes alpha · a @ b in the state's dtype, into `out` if given.

    A GPU's tensor cores multiply bfloat16 and float16 directly and accumulate in float32. If both operands
    are split, the product of the two low parts is left out.
    """
    a_parts, b_parts = (x.parts if isinstance(x, Operand) else (x,) for x in (a, b))
    pairs = [(x, y) for i, x in enumerate(a_parts) for j, y in enumerate(b_parts) if i + j < 2]
    first, second = pairs[0]
    wide = torch.promote_types(state_dtype(first.dtype), state_dtype(second.dtype))
    if out is None and len(pairs) == 1 and not _by_tensor_cores(first, second):
        found = first.to(wide) @ second.to(wide)
        return found if alpha == 1 else found.mul_(alpha)
    if out is None:
        out = torch.empty(len(first), first.shape[1], second.shape[2], dtype=wide, device=first.device)
    for number, (x, y) in enumerate(pairs):
        if _by_tensor_cores(x, y):
            torch.baddbmm(out, x, y, out_dtype=wide, beta=min(number, 1), alpha=alpha, out=out)
        else:
            torch.baddbmm(out, x.to(wide), y.to(wide), beta=min(number, 1), alpha=alpha, out=out)
    return out


def multiplies_directly(x: Tensor) -> bool:
    """Returns True if this device multiplies x in half precision and accumulates in float32."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _by_tensor_cores(a: Tensor, b: Tensor) -> bool:
    return multiplies_directly(a) and a.dim() == 3 and a.dtype == b.dtype

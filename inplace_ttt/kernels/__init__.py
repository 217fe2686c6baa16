"""Triton kernels of the fast weight, called by `inplace_ttt.ops`. Importing them needs torch and Triton."""

from .factor import inverse_factor
from .halves import halves
from .library import chunk_conv, fast_weight
from .support import unsupported

__all__ = ["chunk_conv", "fast_weight", "halves", "inverse_factor", "unsupported"]

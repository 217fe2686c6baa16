"""Triton kernels of the fast weight; `inplace_ttt.ops` binds what is here. Importing it needs torch and
Triton."""

from .factor import inverse_factor
from .halves import halves
from .library import chunk_conv, fast_weight
from .support import unsupported

__all__ = ["chunk_conv", "fast_weight", "halves", "inverse_factor", "unsupported"]

"""Triton kernels of the fast weight; `inplace_ttt.ops` binds what is here. Importing it needs torch and Triton."""

from .library import chunk_conv, fast_weight
from .support import unsupported

__all__ = ["chunk_conv", "fast_weight", "unsupported"]

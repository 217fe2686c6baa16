"""Triton kernels of the fast weight, called by `inplace_ttt.ops`. Importing them needs torch and Triton."""

from .factor import inverse_factor
from .halves import halves
from .indexed_reads import add_indexed_reads
from .library import chunk_conv, fast_weight
from .support import unsupported

__all__ = ["add_indexed_reads", "chunk_conv", "fast_weight", "halves", "inverse_factor", "unsupported"]

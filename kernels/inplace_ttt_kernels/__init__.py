"""Triton kernels of the fast weight; `inplace_ttt.ops` binds what is here."""

"""BABILong (Kuratov et al. 2024, arXiv 2406.10149), made offline at any length.

It hides the facts of bAbI's tasks 1 to 5 among the sentences of a long text.
"""

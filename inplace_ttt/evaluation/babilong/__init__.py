"""BABILong (Kuratov et al. 2024, arXiv 2406.10149): bAbI's tasks 1 to 5 among the sentences of a long text,
made offline at any length."""

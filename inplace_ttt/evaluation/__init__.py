"""Measures how much a converted model remembers: comparisons with TTT on and off, and benchmarks."""

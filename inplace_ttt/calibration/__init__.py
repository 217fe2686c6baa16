"""Measures the tensors that extensions of the method need, on a text."""

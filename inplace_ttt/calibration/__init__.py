"""Measures on a text the tensors that the extensions need."""

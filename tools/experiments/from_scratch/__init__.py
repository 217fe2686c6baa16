"""Compares the memories in small causal models from scratch, with equal parameters, tokens and data order."""

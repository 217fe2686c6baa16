"""Tasks that need recall beyond the attention window, for training and evaluation."""

IGNORED = -100
"""A label that is none, as torch's cross_entropy has it."""

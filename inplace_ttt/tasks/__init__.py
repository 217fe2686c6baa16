"""Tasks that need recall beyond the attention window, for training and evaluation."""

IGNORED = -100
"""Label of a token without a loss, as in torch's cross_entropy."""

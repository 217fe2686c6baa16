"""Tasks that need recall beyond the attention window, for training and evaluation."""

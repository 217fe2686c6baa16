"""Converted checkpoints on disk: full checkpoints, adapters and the reference code's format."""

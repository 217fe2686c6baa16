"""Converted checkpoints on disk: full, as an adapter, in the public code's format."""

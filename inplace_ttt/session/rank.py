"""The default rank of an exported LoRA, known without torch."""

RANK = 128
"""On SmolLM2-135M, a LoRA of this rank keeps nine tenths of a session's gain (docs/export.md)."""

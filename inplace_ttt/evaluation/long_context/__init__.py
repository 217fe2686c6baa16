"""Shared parts of long-context benchmarks.

They are prompts of an exact length in the model's own tokens, batched answers, and one table of variants.
"""

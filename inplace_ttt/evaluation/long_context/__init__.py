"""What long-context benchmarks share: prompts of an exact length in the model's own tokens, answers in
batches, one table of variants."""

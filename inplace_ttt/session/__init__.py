"""Sessions: what a model has read, in memory (session), on disk (file), and held against a model (check)."""

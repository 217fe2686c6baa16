"""Sessions: the text that a model has read, in memory (session), in a file (file), checked (check)."""

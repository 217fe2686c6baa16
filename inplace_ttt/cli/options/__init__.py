"""The arguments of each verb. Nothing here imports torch or transformers, so that --help and refused
arguments are fast."""

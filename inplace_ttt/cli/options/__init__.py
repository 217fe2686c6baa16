"""The arguments of each verb.

Nothing here imports torch or transformers, so that --help and errors in the arguments are fast.
"""

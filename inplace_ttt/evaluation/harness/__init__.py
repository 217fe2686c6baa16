"""Runs tasks of lm-evaluation-harness with TTT on, with TTT off, and on the base.

RULER and BABILong are tasks of this package: their documents are made offline, at an exact length in tokens.
Only `names` and `table` can be imported without lm-eval.
"""

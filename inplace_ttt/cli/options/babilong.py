"""Arguments of `inplace-ttt babilong PATH --lengths 1024,4096 --text TEXT…`."""

from __future__ import annotations

import argparse

from ..arguments import add_texts
from . import long_context

EXAMPLES = """examples:
  inplace-ttt babilong ./smollm2-ttt --lengths 1024,4096,8192 --text book.txt --batch-size 4 --out babilong
  inplace-ttt babilong ./smollm2-ttt --lengths 4096 --text books/ --tasks qa1,qa2 \\
    --samples 500 --base ./smollm2-135m
  inplace-ttt babilong ./smollm2-ttt --lengths 4096 --text book.txt --write-samples samples"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    long_context.add_samples(parser, "qa1 to qa5 (default: all)", "as in the benchmark")
    add_texts(parser, "--text", "texts to hide facts in (BABILong uses PG-19's books)")
    long_context.add_run(parser)

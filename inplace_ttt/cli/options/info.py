"""Arguments of `inplace-ttt info PATH`."""

from __future__ import annotations

import argparse

from ..arguments import add_base, path

EXAMPLES = """examples:
  inplace-ttt info ./smollm2-ttt
  inplace-ttt info ./llama-ttt --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=path, metavar="PATH", help="converted checkpoint or adapter folder (also PEFT's)"
    )
    add_base(parser)

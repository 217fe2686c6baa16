"""`inplace-ttt babilong PATH --lengths 1024,4096 --text F…`"""

from __future__ import annotations

import argparse
from typing import Any

from ..evaluation.babilong import table
from ..evaluation.babilong.filler import Filler
from ..evaluation.babilong.tasks import TASKS
from . import Result, long_context
from .arguments import path

EXAMPLES = """examples:
  inplace-ttt babilong ./smollm2-ttt --lengths 1024,4096,8192 --text book.txt --batch-size 4 --out babilong
  inplace-ttt babilong ./smollm2-ttt --lengths 4096 --text books/ --tasks qa1,qa2 --samples 500 --base ./smollm2-135m
  inplace-ttt babilong ./smollm2-ttt --lengths 4096 --text book.txt --write-samples samples"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    long_context.add_samples(parser, "qa1 to qa5 (default: all)", "as in the benchmark")
    parser.add_argument(
        "--text",
        type=path,
        required=True,
        nargs="+",
        metavar="F",
        help="UTF-8 texts to hide facts in, or folders of .txt; BABILong has PG-19's books",
    )
    long_context.add_run(parser)


def run(args: argparse.Namespace) -> Result:
    settings = long_context.settings_of(args, long_context.chosen(args.tasks, TASKS, TASKS))
    return long_context.compare(args, settings, Filler(args.text), table.table)


def render(result: dict[str, Any]) -> str:
    return long_context.render(result, table.render)

"""Arguments of `inplace-ttt ruler PATH --lengths 4096,8192`."""

from __future__ import annotations

import argparse

from ..arguments import add_texts, path, refuse_without_effect
from . import long_context

EXAMPLES = """examples:
  inplace-ttt ruler ./smollm2-ttt --lengths 4096,8192 --haystack book.txt --samples 50 \\
    --batch-size 4 --out ruler
  inplace-ttt ruler ./smollm2-ttt --lengths 4096 --tasks niah_single_1,vt,fwe --base ./smollm2-135m
  inplace-ttt ruler ./smollm2-ttt --lengths 4096 --haystack book.txt --write-samples samples"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = "RULER's names (default: all; qa_1 and qa_2 if --qa gives their files)"
    long_context.add_samples(parser, tasks, "the benchmark's own: 500")
    add_texts(
        parser,
        "--haystack",
        "text to hide needles in (RULER uses Paul Graham's essays)",
        several=False,
        required=False,
    )
    parser.add_argument(
        "--qa",
        nargs="+",
        type=path,
        default=[],
        metavar="PATH",
        help="questions of qa_1, then of qa_2 (see docs/evaluate.md)",
    )
    long_context.add_run(parser)
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    long_context.check(args)
    refuse_without_effect(args, text_field=("haystack",))

"""Arguments of `inplace-ttt diagnose PATH --text TEXT --out DIR`."""

from __future__ import annotations

import argparse

from ..arguments import MOST_TOKENS, add_base, add_dtype, add_texts, number, path, whole

EXAMPLES = """examples:
  inplace-ttt diagnose ./smollm2-ttt --text book.txt --out diagnosis
  inplace-ttt diagnose ./smollm2-ttt --text book.txt --out diagnosis --train ttt --learning-rate 1e-3

exit code: 0 the report is written, whatever the findings; 2 bad input"""

TOKENS = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    add_texts(parser, "--text", "text to read as one document from its start", several=False)
    parser.add_argument(
        "--out",
        type=path,
        required=True,
        metavar="DIR",
        help="new folder for report.html, diagnose.json and the plots",
    )
    parser.add_argument(
        "--tokens",
        type=whole(1, MOST_TOKENS),
        metavar="N",
        help=f"tokens of the text to read (default: {TOKENS}, at least two chunks)",
    )
    parser.add_argument(
        "--train",
        choices=("all", "ttt"),
        default="all",
        help="parameters that count as trained (default: all)",
    )
    parser.add_argument(
        "--learning-rate",
        type=number(most=1e3, above=0),
        metavar="FLOAT",
        help="learning rate of Adam's first step (default: 5e-6, the paper's)",
    )
    add_base(parser)
    add_dtype(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it exists")

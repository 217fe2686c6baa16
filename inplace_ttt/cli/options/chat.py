"""Arguments of `inplace-ttt chat MODEL`."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ..arguments import MOST_TOKENS, dtype, number, path, whole

EXAMPLES = """examples:
  inplace-ttt chat ./smollm2-ttt
  inplace-ttt chat ./smollm2-ttt --session ada.session --read book.txt notes.txt
  inplace-ttt chat ./smollm2-ttt --session ada.session --system "Answer in one sentence."
  printf '/read book.txt\\nWhat happened to the whale?\\n' | inplace-ttt chat ./smollm2-ttt

commands in the chat:
  /read FILE, /forget, /drop, /save [FILE], /fork FILE, /off, /on, /info, /help, /quit"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="MODEL", help="converted checkpoint or adapter folder")
    parser.add_argument(
        "--session",
        type=path,
        metavar="PATH",
        help="continue the session in this file if it exists, and save it there after each turn",
    )
    parser.add_argument(
        "--read", type=path, nargs="+", default=[], metavar="FILE", help="UTF-8 texts to read first"
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions at the start of the conversation")
    parser.add_argument(
        "--max-new-tokens",
        type=whole(1, MOST_TOKENS),
        default=512,
        metavar="N",
        help="most tokens of an answer (default: 512)",
    )
    parser.add_argument(
        "--temperature",
        type=number(1e-4, 1e4, or_zero=True),
        default=0.0,
        metavar="FLOAT",
        help="of sampling; 0 always takes the most likely token (default: 0)",
    )
    parser.add_argument(
        "--ttt",
        choices=("on", "off"),
        default="on",
        help="off: without the fast weights until /on, as by /off (default: on)",
    )
    parser.add_argument(
        "--base", type=path, metavar="PATH", help="present place of an adapter's base, if it was moved"
    )
    parser.add_argument(
        "--dtype",
        type=dtype,
        default="auto",
        metavar="DTYPE",
        help="float32, bfloat16, … (default: the checkpoint's)",
    )
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    if args.system is not None and not args.system.strip():
        raise InPlaceTTTError("--system is empty; give instructions, or leave it out.")

"""Arguments of `inplace-ttt chat MODEL`."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ..arguments import MOST_TOKENS, add_base, add_dtype, add_temperature, path, whole

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
    add_temperature(parser)
    parser.add_argument(
        "--ttt",
        choices=("on", "off"),
        default="on",
        help="off: start without the fast weights, as after /off (default: on)",
    )
    add_base(parser)
    add_dtype(parser)
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    if args.system is not None and not args.system.strip():
        raise InPlaceTTTError("--system is empty; give instructions, or leave it out.")

"""Arguments of `inplace-ttt export PATH OUT --format FORMAT`."""

from __future__ import annotations

import argparse

from ...session.rank import RANK
from ..arguments import add_base, add_push, path, whole

EXAMPLES = """examples:
  inplace-ttt export ./smollm2-ttt ./smollm2-adapter --format adapter
  inplace-ttt export ./smollm2-adapter ./smollm2-full --format full
  inplace-ttt export runs/lora/final ./smollm2-merged --format full
  inplace-ttt export ./qwen3-8b-ttt ./qwen3-8b-public --format reference
  inplace-ttt export ./smollm2-gradient ./book-lora --format lora --session book.state
  inplace-ttt export ./smollm2-gradient ./book-plain --format plain --session book.state"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=path, metavar="PATH", help="converted checkpoint or adapter folder (also PEFT's)"
    )
    parser.add_argument("out", type=path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--format",
        required=True,
        choices=("reference", "adapter", "full", "plain", "lora"),
        help="format to write; plain and lora hold a session, and need no inplace-ttt to load",
    )
    parser.add_argument(
        "--session",
        type=path,
        nargs="+",
        metavar="PATH",
        help="session file to export as plain or lora; the writes of several files are added up",
    )
    parser.add_argument(
        "--rank",
        type=whole(1),
        metavar="K",
        help=f"rank of a LoRA, at most the model's width (default: {RANK})",
    )
    parser.add_argument(
        "--text",
        type=path,
        metavar="PATH",
        help="UTF-8 text whose loss is measured (default: the session's text)",
    )
    add_base(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_push(parser)

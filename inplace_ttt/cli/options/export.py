"""Arguments of `inplace-ttt export PATH OUT --format FORMAT`."""

from __future__ import annotations

import argparse

from ..arguments import add_push, path

EXAMPLES = """examples:
  inplace-ttt export ./smollm2-ttt ./smollm2-adapter --format adapter
  inplace-ttt export ./smollm2-adapter ./smollm2-full --format full
  inplace-ttt export runs/lora/final ./smollm2-merged --format full
  inplace-ttt export ./qwen3-8b-ttt ./qwen3-8b-public --format reference"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=path, metavar="PATH", help="converted checkpoint or adapter folder (also PEFT's)"
    )
    parser.add_argument("out", type=path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--format", required=True, choices=("reference", "adapter", "full"), help="format to write"
    )
    parser.add_argument(
        "--base", type=path, metavar="PATH", help="present place of an adapter's base, if it was moved"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_push(parser)

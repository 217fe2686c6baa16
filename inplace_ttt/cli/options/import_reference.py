"""Arguments of `inplace-ttt import-reference PATH OUT`."""

from __future__ import annotations

import argparse

from ..arguments import path

EXAMPLES = """examples:
  inplace-ttt import-reference ./in-place-ttt-qwen3-8b ./qwen3-8b-ttt
  inplace-ttt import-reference ./ttt-ntp-qwen3-4b ./qwen3-4b-ntp"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=path,
        metavar="PATH",
        help="checkpoint of the reference code of In-Place TTT, or of TTT-NTP",
    )
    parser.add_argument("out", type=path, metavar="OUT", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")

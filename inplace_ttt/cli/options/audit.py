"""Arguments of `inplace-ttt audit PATH_OR_RECIPE`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import InPlaceTTTError
from ..arguments import path, seed

EXAMPLES = """examples:
  inplace-ttt audit ./smollm2-ttt
  inplace-ttt audit ./smollm2-ttt --format html --out audit.html
  inplace-ttt audit ./reference-ttt --profile reference
  inplace-ttt audit ./smollm2-ttt --compare ./reference-ttt
  inplace-ttt audit recipes/run.yaml

exit code: 0 no undeclared deviation, 1 an undeclared deviation, 2 bad input"""

_FORMATS = ("md", "html", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=path,
        metavar="PATH_OR_RECIPE",
        help="converted checkpoint, adapter folder (also PEFT's), or training recipe (YAML)",
    )
    parser.add_argument(
        "--profile",
        metavar="PROFILE",
        help="method to compare with: paper, reference or ttt_ntp (default: paper, or the recipe's)",
    )
    parser.add_argument(
        "--format",
        default="md",
        metavar="FORMAT",
        help=f"format of the report: {', '.join(_FORMATS)} (default: md)",
    )
    parser.add_argument(
        "--out", type=path, metavar="PATH", help="file to write the report to, instead of printing it"
    )
    parser.add_argument(
        "--compare",
        type=path,
        metavar="PATH_OR_RECIPE",
        help="another checkpoint or recipe; report the differences (the exit code is the first's)",
    )
    parser.add_argument(
        "--card", action="store_true", help="also put the verdict into the checkpoint's model card"
    )
    parser.add_argument(
        "--seed", type=seed(), default=0, metavar="N", help="seed of the random inputs (default: 0)"
    )
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    if args.format not in _FORMATS:
        raise InPlaceTTTError(f"--format must be one of {', '.join(_FORMATS)}, got {args.format!r}.")
    if args.out is not None and not Path(args.out).absolute().parent.is_dir():
        raise InPlaceTTTError(f"--out {args.out} is in a folder that does not exist; create it first.")

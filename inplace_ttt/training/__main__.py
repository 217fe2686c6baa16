"""`deepspeed --module inplace_ttt.training RECIPE`: one process of a run."""

import argparse
import logging
import os
import sys

from ..errors import InPlaceTTTError
from .recipe import load_recipe
from .worker import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m inplace_ttt.training", description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a setting of the recipe")
    parser.add_argument("--from-scratch", action="store_true", help="start anew although the output has checkpoints")
    parser.add_argument("--no-audit", action="store_true", help="start although the run deviates from the paper undeclared")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    options = parser.parse_args()
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if not first:
        logging.disable(logging.WARNING)
    try:
        run(load_recipe(options.recipe, options.set), resume=not options.from_scratch, audit=not options.no_audit)
    except InPlaceTTTError as error:
        if first:
            print(f"inplace-ttt: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

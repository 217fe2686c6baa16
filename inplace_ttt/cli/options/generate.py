"""Arguments of `inplace-ttt generate PATH --prompt-file PATH`."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ..arguments import (
    MOST_TOKENS,
    add_base,
    add_dtype,
    add_temperature,
    path,
    refuse_without_effect,
    seed,
    whole,
)

EXAMPLES = """examples:
  inplace-ttt generate ./smollm2-ttt --prompt-file book.txt --max-new-tokens 100
  inplace-ttt generate ./smollm2-ttt --prompt-file book.txt --max-new-tokens 0 --save-state book.state
  inplace-ttt generate ./smollm2-gradient --prompt-file notes.txt --readings 4 \\
    --max-new-tokens 0 --save-state notes.state
  echo "What happened to the whale?" | \\
    inplace-ttt generate ./smollm2-ttt --prompt-file - --load-state book.state"""

MOST_READINGS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    parser.add_argument(
        "--prompt-file",
        type=path,
        required=True,
        metavar="PATH",
        help="UTF-8 text to read; - is standard input",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=whole(0, MOST_TOKENS),
        default=64,
        metavar="N",
        help="tokens to generate (default: 64; 0 only reads)",
    )
    add_temperature(parser)
    parser.add_argument(
        "--seed", type=seed(), metavar="N", help="seed for a temperature above 0 (default: 0)"
    )
    parser.add_argument(
        "--ttt",
        choices=("on", "off"),
        default="on",
        help="off: the same weights without writes (default: on)",
    )
    parser.add_argument("--load-state", type=path, metavar="PATH", help="continue a saved session")
    parser.add_argument("--save-state", type=path, metavar="PATH", help="save the session at the end")
    parser.add_argument(
        "--fast-weights-only", action="store_true", help="save the fast weights without the KV cache"
    )
    parser.add_argument(
        "--readings",
        type=whole(1, MOST_READINGS),
        default=1,
        metavar="N",
        help="read the text N times, each time with an empty KV cache (default: 1); improves recall with "
        "the gradient preset",
    )
    add_base(parser)
    add_dtype(parser)
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    refuse_without_effect(args, seed=("temperature",), fast_weights_only=("save_state",))
    if args.temperature and not args.max_new_tokens:
        raise InPlaceTTTError("--temperature does nothing with --max-new-tokens 0; leave it out.")
    if args.max_new_tokens == 0 and not args.save_state:
        raise InPlaceTTTError(
            "--max-new-tokens 0 only reads, and nothing is kept without --save-state; add --save-state PATH."
        )
    if args.readings > 1 and (args.ttt == "off" or args.load_state):
        raise InPlaceTTTError(
            "--readings reads a text into new fast weights, so it works with neither --ttt off nor "
            "--load-state; drop one."
        )
    if args.ttt == "off" and (args.save_state or args.load_state):
        raise InPlaceTTTError(
            "--ttt off writes no state, so --save-state and --load-state do nothing; drop one."
        )

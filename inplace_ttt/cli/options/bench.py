"""Arguments of `inplace-ttt bench` and `inplace-ttt bench --serving PATH`."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import InPlaceTTTError
from ..arguments import MOST_TOKENS, device, path, whole

EXAMPLES = """examples:
  inplace-ttt bench
  inplace-ttt bench --d 2560 --h 9728 --tokens 32768 --chunk-size 1024 --device cuda --dtype bfloat16
  inplace-ttt bench --serving ./smollm2-ttt --base ./smollm2-135m
  inplace-ttt bench --serving ./smollm2-ttt --requests 16 --prompt-tokens 256"""

_OP = {"d": 1024, "h": 3072, "tokens": 8192, "chunk_size": 256, "device": "cpu"}

_SERVING = {"base": None, "requests": (1, 8, 32), "prompt_tokens": 1024, "new_tokens": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    op = parser.add_argument_group("the fast-weight op (default)")
    for name, least, most, meaning in (
        ("--d", 2, 2**20, "hidden size"),  # ridge regression uses half as many directions, hence at least 2
        ("--h", 1, 2**20, "MLP size"),
        ("--tokens", 1, MOST_TOKENS, "tokens of the sequence"),
        ("--chunk-size", 1, MOST_TOKENS, "tokens per chunk"),
    ):
        _number(op, name, most, meaning, _OP, least)
    op.add_argument("--device", type=device, help="cpu or cuda (default: cpu)")
    serving = parser.add_argument_group("serving with vLLM")
    serving.add_argument(
        "--serving",
        type=path,
        metavar="PATH",
        help="converted checkpoint to compare with its base and with generate",
    )
    serving.add_argument(
        "--base", type=path, metavar="PATH", help="the base (default: the one that the checkpoint names)"
    )
    serving.add_argument(
        "--requests",
        type=whole(1, 4096),
        nargs="+",
        metavar="N",
        help="numbers of concurrent requests, each measured (default: 1 8 32)",
    )
    _number(
        serving,
        "--prompt-tokens",
        MOST_TOKENS,
        "tokens of the longest prompt; the shortest prompt has a sixteenth of them",
        _SERVING,
    )
    _number(serving, "--new-tokens", MOST_TOKENS, "tokens generated per request", _SERVING)
    parser.add_argument(
        "--repeats", type=whole(1, 10_000), default=5, metavar="N", help="paired runs (default: 5)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the tensors (default: float32)",
    )
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    """Refuses options of the benchmark that is not chosen, and fills in the defaults of the chosen one."""
    mine, others = (_OP, _SERVING) if args.serving is None else (_SERVING, _OP)
    if idle := [name for name in others if getattr(args, name) is not None]:
        with_or_without = "without" if args.serving is None else "with"
        raise InPlaceTTTError(
            f"--{idle[0].replace('_', '-')} does nothing {with_or_without} --serving; leave it out."
        )
    for name, default in mine.items():
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))


def _number(
    group: argparse._ArgumentGroup,
    name: str,
    most: int,
    meaning: str,
    defaults: dict[str, Any],
    least: int = 1,
) -> None:
    default = defaults[name.removeprefix("--").replace("-", "_")]
    group.add_argument(name, type=whole(least, most), metavar="N", help=f"{meaning} (default: {default})")

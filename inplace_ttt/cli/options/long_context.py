"""Options that the verbs of long-context benchmarks share."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ..arguments import dtype, numbers, path, seed, whole


def add_samples(parser: argparse.ArgumentParser, tasks: str, own: str) -> None:
    """What is asked. tasks: the help of --tasks; own: the benchmark's own number of samples."""
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    parser.add_argument(
        "--lengths",
        type=numbers,
        required=True,
        metavar="L,…",
        help="tokens of prompt and answer, such as 4096,8192",
    )
    parser.add_argument("--tasks", metavar="T,…", help=tasks)
    parser.add_argument(
        "--samples",
        type=whole(1, 10**6),
        default=100,
        metavar="N",
        help=f"a task and length (default: 100; {own})",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Who is asked, how, and where the results go."""
    parser.add_argument(
        "--base",
        type=path,
        metavar="B",
        help="unconverted checkpoint to compare with; of an adapter, where its base is",
    )
    parser.add_argument("--batch-size", type=whole(1), metavar="N", help="prompts at once (default: 1)")
    parser.add_argument("--seed", type=seed(), default=0, metavar="S", help="of the samples (default: 0)")
    parser.add_argument("--chat", action="store_true", help="ask in the tokenizer's chat template")
    parser.add_argument(
        "--dtype",
        type=dtype,
        default="auto",
        metavar="D",
        help="float32, bfloat16, … (default: the checkpoint's)",
    )
    parser.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="keep each result as it comes; the same command goes on where it stopped",
    )
    parser.add_argument(
        "--write-samples",
        type=path,
        metavar="DIR",
        help="write the samples as JSON lines instead; needs PATH's tokenizer alone",
    )
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    if not args.write_samples:
        return
    for option, given in (
        ("--out", args.out),
        ("--batch-size", args.batch_size),
        ("--dtype", args.dtype != "auto"),
    ):
        if given:
            raise InPlaceTTTError(
                f"{option} has no effect with --write-samples, which asks no model; leave it out."
            )

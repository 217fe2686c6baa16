"""Arguments that the verbs of long-context benchmarks share."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ..arguments import add_dtype, numbers, path, seed, whole


def add_samples(parser: argparse.ArgumentParser, tasks: str, own: str) -> None:
    """Adds the options for the questions.

    Args:
        parser: the verb's parser.
        tasks: the help of --tasks.
        own: the benchmark's own number of samples, for the help.
    """
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    parser.add_argument(
        "--lengths",
        type=numbers,
        required=True,
        metavar="N,…",
        help="tokens of prompt and answer, such as 4096,8192",
    )
    parser.add_argument("--tasks", metavar="TASK,…", help=tasks)
    parser.add_argument(
        "--samples",
        type=whole(1, 10**6),
        default=100,
        metavar="N",
        help=f"samples per task and length (default: 100; {own})",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the models, the run and its output."""
    parser.add_argument(
        "--base",
        type=path,
        metavar="PATH",
        help="unconverted checkpoint to compare with; for an adapter, the place of its base",
    )
    parser.add_argument("--batch-size", type=whole(1), metavar="N", help="prompts per batch (default: 1)")
    parser.add_argument(
        "--seed", type=seed(), default=0, metavar="N", help="seed of the samples (default: 0)"
    )
    parser.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    add_dtype(parser)
    parser.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="folder for the results; the same command resumes an interrupted run",
    )
    parser.add_argument(
        "--write-samples",
        type=path,
        metavar="DIR",
        help="write the samples as JSON lines instead; needs only PATH's tokenizer",
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
                f"{option} does nothing with --write-samples, which runs no model; leave it out."
            )

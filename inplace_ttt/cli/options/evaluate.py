"""Arguments of `inplace-ttt evaluate PATH --text TEXT…`."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ...tasks.facts import MOST as MOST_RECORDS
from ..arguments import (
    MOST_TOKENS,
    add_dtype,
    add_texts,
    numbers,
    path,
    rates,
    refuse_without_effect,
    seed,
    whole,
)

EXAMPLES = """examples:
  inplace-ttt evaluate ./smollm2-ttt --text speeches/ --documents 24 --tokens 2048
  inplace-ttt evaluate runs/x/final --text a.txt b.txt --base ./smollm2 --window 256 --repeated-passage
  inplace-ttt evaluate runs/x/final --text books/ --contexts 1024,4096,8192 --out evaluation
  inplace-ttt evaluate runs/x/final --text books/ --documents 8 --tokens 2048 --window 256 \\
    --facts 6 --distances 1024,16384

on, off: the same weights with and without writes.
mismatched: each document read with the state that another document wrote.
document_gain = on - mismatched: the effect of the document's own text.
generic_gain = mismatched - off: the effect that any document's writes have.

exit code: 0 done, whatever the numbers; 2 bad input"""

DISTANCES = [1024, 4096]

RATES = [1.0, 5.0, 20.0]

BLOCK = 512
"""Tokens of the last block, on which the loss is measured after growing contexts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    add_texts(parser, "--text", "documents to read, one per text file or record")
    parser.add_argument(
        "--base",
        type=path,
        metavar="PATH",
        help="model to compare with: the unchanged base, or one trained as long without TTT",
    )
    parser.add_argument(
        "--documents",
        type=whole(1),
        metavar="N",
        help="read the first N that are long enough (default: all; each must be long enough)",
    )
    parser.add_argument(
        "--tokens",
        type=whole(1, MOST_TOKENS),
        metavar="N",
        help="tokens to read of each document (default: the model's context)",
    )
    parser.add_argument(
        "--window",
        type=whole(1),
        metavar="N",
        help="attend only to the last N tokens and the sinks (default: as the model does)",
    )
    parser.add_argument(
        "--sinks", type=whole(0), metavar="N", help="first tokens that stay visible (default: 4)"
    )
    parser.add_argument(
        "--skip",
        type=whole(0),
        metavar="N",
        help="first tokens that do not count (default: a chunk, or the window if longer)",
    )
    parser.add_argument(
        "--repeated-passage",
        action="store_true",
        help="also measure the loss of a passage repeated beyond the window",
    )
    parser.add_argument(
        "--passage",
        type=numbers,
        metavar="LENGTH,GAP",
        help="length of the repeated passage and gap between its copies, in tokens (default: 512,1024)",
    )
    parser.add_argument(
        "--contexts",
        type=numbers,
        metavar="N,…",
        help="also measure the loss on a fixed last block after each of these numbers of context tokens",
    )
    parser.add_argument(
        "--block", type=whole(1, MOST_TOKENS), metavar="N", help="tokens of that last block (default: 512)"
    )
    parser.add_argument(
        "--facts",
        type=whole(1, MOST_RECORDS),
        metavar="N",
        help="also test recall: put N records of invented facts into each document, and ask for them later "
        "(try 6)",
    )
    parser.add_argument(
        "--distances",
        type=numbers,
        metavar="N,…",
        help="tokens between facts and questions (default: 1024,4096)",
    )
    parser.add_argument(
        "--rivals",
        action="store_true",
        help="also measure dynamic evaluation: one gradient step per chunk on the same down-projections",
    )
    parser.add_argument(
        "--rates",
        type=rates,
        metavar="RATE,…",
        help="learning rates of dynamic evaluation (default: 1,5,20)",
    )
    parser.add_argument(
        "--batch-size", type=whole(1), default=4, metavar="N", help="documents per batch (default: 4)"
    )
    parser.add_argument(
        "--seed", type=seed(), metavar="N", help="seed of the passages' places and of the facts (default: 0)"
    )
    parser.add_argument(
        "--cache",
        type=path,
        metavar="DIR",
        help="folder for losses without writes, which the next model of the same base reuses",
    )
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="new folder for evaluation.json and the plots"
    )
    parser.add_argument("--card", action="store_true", help="also put the result into PATH's model card")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it exists")
    add_dtype(parser)
    parser.set_defaults(check=check)


def check(args: argparse.Namespace) -> None:
    refuse_without_effect(
        args,
        sinks=("window",),
        passage=("repeated_passage",),
        block=("contexts",),
        distances=("facts",),
        rates=("rivals",),
        seed=("repeated_passage", "facts"),
        overwrite=("out",),
    )
    if len(args.passage or (0, 0)) != 2:
        raise InPlaceTTTError(f"--passage takes a length and a gap like 512,1024, got {args.passage!r}.")

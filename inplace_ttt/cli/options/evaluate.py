"""Arguments of `inplace-ttt evaluate PATH`, with `--text TEXT…` or `--tasks TASK,…`."""

from __future__ import annotations

import argparse

from ...errors import InPlaceTTTError
from ...tasks.facts import MOST as MOST_RECORDS
from ..arguments import (
    MOST_TOKENS,
    add_dtype,
    add_texts,
    flag,
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
  inplace-ttt evaluate ./smollm2-ttt --tasks ruler,babilong --lengths 4096,8192 --text book.txt \\
    --samples 50 --batch-size 4 --base ./smollm2-135m --out scores
  inplace-ttt evaluate ./smollm2-ttt --tasks hellaswag,arc_easy --base ./smollm2-135m

on, off: the same weights with and without writes.
mismatched: each document read with the state that another document wrote.
document_gain = on - mismatched: the effect of the document's own text.
generic_gain = mismatched - off: the effect that any document's writes have.

exit code: 0 done, whatever the numbers; 2 bad input"""

DISTANCES = [1024, 4096]

RATES = [1.0, 5.0, 20.0]

BLOCK = 512
"""Tokens of the last block, on which the loss is measured after growing contexts."""

BATCH = 4
"""Documents per batch, without --tasks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    add_texts(
        parser,
        "--text",
        "documents to read, one per text file or record; with --tasks the text around needles and facts",
        required=False,
    )
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
        "--batch-size",
        type=whole(1),
        metavar="N",
        help="documents per batch (default: 4), or prompts with --tasks (default: 1)",
    )
    parser.add_argument(
        "--seed",
        type=seed(),
        metavar="N",
        help="seed of the passages' places, of the facts, and of the tasks' samples (default: 0)",
    )
    parser.add_argument(
        "--cache",
        type=path,
        metavar="DIR",
        help="folder for losses without writes, which the next model of the same base reuses",
    )
    parser.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="new folder for evaluation.json and the plots; with --tasks for the results, from which the "
        "same command resumes an interrupted run",
    )
    parser.add_argument("--card", action="store_true", help="also put the result into PATH's model card")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it exists")
    add_dtype(parser)
    _add_tasks(parser)
    parser.set_defaults(check=check)


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks",
        metavar="TASK,…",
        help="score tasks instead: ruler, babilong or tasks of them such as ruler_vt and babilong_qa1, "
        "lm-eval's own tasks, and YAML files",
    )
    parser.add_argument(
        "--lengths",
        type=numbers,
        metavar="N,…",
        help="tokens of prompt and answer in ruler and babilong, such as 4096,8192",
    )
    parser.add_argument(
        "--samples",
        type=whole(1, 10**6),
        metavar="N",
        help="samples per task and length (default: 100; all of lm-eval's own tasks)",
    )
    parser.add_argument(
        "--qa",
        nargs="+",
        type=path,
        metavar="PATH",
        help="questions of ruler_qa_1, then of ruler_qa_2 (see docs/evaluate.md)",
    )
    parser.add_argument("--chat", action="store_true", help="put prompts into the tokenizer's chat template")
    parser.add_argument(
        "--write-samples",
        type=path,
        metavar="DIR",
        help="write the samples as JSON lines instead; needs only PATH's tokenizer",
    )


_OF_DOCUMENTS = (
    *("documents", "tokens", "window", "sinks", "skip", "repeated_passage", "passage", "contexts", "block"),
    *("facts", "distances", "rivals", "rates", "cache", "card", "overwrite"),
)
"""Options that do nothing with --tasks."""


def check(args: argparse.Namespace) -> None:
    if args.tasks is None and args.text is None:
        raise InPlaceTTTError("evaluate needs --text TEXT with documents to read, or --tasks TASK.")
    for name in _OF_DOCUMENTS if args.tasks is not None else ():
        if getattr(args, name) not in (None, False):
            raise InPlaceTTTError(f"{flag(name)} does nothing with --tasks; leave it out.")
    for name in ("base", "out", "batch_size", "dtype") if args.write_samples else ():
        if getattr(args, name) not in (None, "auto"):
            raise InPlaceTTTError(
                f"{flag(name)} does nothing with --write-samples, which runs no model; leave it out."
            )
    if len(args.qa or ()) > 2:
        raise InPlaceTTTError(f"--qa takes a file for ruler_qa_1 and one for ruler_qa_2, got {len(args.qa)}.")
    refuse_without_effect(
        args,
        lengths=("tasks",),
        samples=("tasks",),
        qa=("tasks",),
        chat=("tasks",),
        write_samples=("tasks",),
        text_field=("text",),
        sinks=("window",),
        passage=("repeated_passage",),
        block=("contexts",),
        distances=("facts",),
        rates=("rivals",),
        seed=("repeated_passage", "facts", "tasks"),
        overwrite=("out",),
    )
    if len(args.passage or (0, 0)) != 2:
        raise InPlaceTTTError(f"--passage takes a length and a gap like 512,1024, got {args.passage!r}.")

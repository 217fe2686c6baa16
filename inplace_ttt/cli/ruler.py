"""`inplace-ttt ruler PATH --lengths 4096,8192`"""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import InPlaceTTTError
from ..evaluation.ruler import table
from ..evaluation.ruler.material import Material
from ..evaluation.ruler.tasks import TASKS, RulerTask
from . import Result, long_context
from .arguments import path
from .messages import warn

EXAMPLES = """examples:
  inplace-ttt ruler ./smollm2-ttt --lengths 4096,8192 --haystack book.txt --samples 50 --batch-size 4 --out ruler
  inplace-ttt ruler ./smollm2-ttt --lengths 4096 --tasks niah_single_1,vt,fwe --base ./smollm2-135m
  inplace-ttt ruler ./smollm2-ttt --lengths 4096 --haystack book.txt --write-samples samples"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = "RULER's names (default: all, qa_1 and qa_2 where --qa gives their files)"
    long_context.add_samples(parser, tasks, "the benchmark's own: 500")
    parser.add_argument("--haystack", type=path, metavar="F", help="UTF-8 text to hide needles in; RULER has Paul Graham's essays")
    parser.add_argument(
        "--qa", nargs="+", type=path, default=[], metavar="F", help="questions of qa_1, then of qa_2 (see docs/evaluate.md)"
    )
    long_context.add_run(parser)


def run(args: argparse.Namespace) -> Result:
    possible = [name for name, task in TASKS.items() if task.questions is None or task.questions < len(args.qa)]
    tasks = long_context.chosen(args.tasks, possible, TASKS)
    material = Material(args.haystack, args.qa)
    _refuse_without_files(tasks, args)
    if args.haystack and not any(task.haystack or task.name == "cwe" for task in tasks):
        warn("--haystack has no effect: none of these tasks hides anything in a text.")
    if args.qa and not any(task.questions is not None for task in tasks):
        warn("--qa has no effect: none of these tasks asks its questions.")
    return long_context.compare(args, long_context.settings_of(args, tasks), material, table.table)


def render(result: dict[str, Any]) -> str:
    return long_context.render(result, table.render)


def _refuse_without_files(tasks: tuple[RulerTask, ...], args: argparse.Namespace) -> None:
    if len(args.qa) > 2:
        raise InPlaceTTTError(f"--qa takes a file for qa_1 and one for qa_2, got {len(args.qa)}.")
    if not args.haystack and (need := [task.name for task in tasks if task.haystack]):
        raise InPlaceTTTError(f"{', '.join(need)} hide needles in a text; give one with --haystack F, or name other --tasks.")
    for task in tasks:
        number = task.questions
        if number is not None and number >= len(args.qa):
            raise InPlaceTTTError(
                f"{task.name} needs questions; give {'a file' if number == 0 else 'two files'} with --qa, or leave it out."
            )

"""Runs `inplace-ttt ruler PATH --lengths 4096,8192`."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import InPlaceTTTError
from ..evaluation.ruler import table
from ..evaluation.ruler.material import Material
from ..evaluation.ruler.tasks import TASKS, RulerTask
from . import Result, long_context
from .messages import warn


def run(args: argparse.Namespace) -> Result:
    possible = [
        name for name, task in TASKS.items() if task.questions is None or task.questions < len(args.qa)
    ]
    tasks = long_context.chosen(args.tasks, possible, TASKS)
    material = Material(args.haystack, args.qa, args.text_field)
    _refuse_without_files(tasks, args)
    if args.haystack and not any(task.haystack or task.name == "cwe" for task in tasks):
        warn("--haystack does nothing: none of these tasks hides anything in a text.")
    if args.qa and not any(task.questions is not None for task in tasks):
        warn("--qa does nothing: none of these tasks asks its questions.")
    return long_context.compare(args, long_context.settings_of(args, tasks), material, table.table)


def render(result: dict[str, Any]) -> str:
    return long_context.render(result, table.render)


def _refuse_without_files(tasks: tuple[RulerTask, ...], args: argparse.Namespace) -> None:
    if len(args.qa) > 2:
        raise InPlaceTTTError(f"--qa takes a file for qa_1 and one for qa_2, got {len(args.qa)}.")
    if not args.haystack and (need := [task.name for task in tasks if task.haystack]):
        raise InPlaceTTTError(
            f"{', '.join(need)} hide needles in a text; give one with --haystack TEXT, or name other --tasks."
        )
    for task in tasks:
        number = task.questions
        if number is not None and number >= len(args.qa):
            raise InPlaceTTTError(
                f"{task.name} needs questions; give {'a file' if number == 0 else 'two files'} with --qa, "
                "or leave it out."
            )

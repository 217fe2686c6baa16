"""Runs `inplace-ttt babilong PATH --lengths 1024,4096 --text TEXT…`."""

from __future__ import annotations

import argparse
from typing import Any

from ..evaluation.babilong import table
from ..evaluation.babilong.filler import Filler
from ..evaluation.babilong.tasks import TASKS
from . import Result, long_context


def run(args: argparse.Namespace) -> Result:
    settings = long_context.settings_of(args, long_context.chosen(args.tasks, TASKS, TASKS))
    return long_context.compare(args, settings, Filler(args.text, args.text_field), table.table)


def render(result: dict[str, Any]) -> str:
    return long_context.render(result, table.render)

"""Runs `inplace-ttt audit PATH_OR_RECIPE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, logging

from ..audit.auditor import as_declarations, audit_model
from ..audit.item import known
from ..audit.report import Declaration, Report, for_card, is_report
from ..checkpoint.card import add_to_card, require_card
from ..checkpoint.opened import open_model
from ..errors import InPlaceTTTError, reported
from ..files.folders import new_file
from ..files.json_files import json_text
from ..files.manifest import refuse_file
from . import Result


def run(args: argparse.Namespace) -> Result:
    if args.profile is not None:
        known(args.profile)
    if args.out is not None:
        refuse_file(args.out, is_report(args.out))
    if args.card:
        require_card(args.path)
    report = _audit(args.path, args)
    other = None if args.compare is None else _audit(args.compare, args)
    result = report.to_dict()
    if args.card:
        add_to_card(args.path, audit=for_card(result))
    if other is not None:
        result["compare"] = report.compared(other)
    write = {
        "md": report.to_markdown,
        "html": report.to_html,
        "json": lambda other: json_text(result, indent=1) + "\n",
    }[args.format]
    text = write(other)
    if args.out is not None:
        with new_file(args.out, ours=is_report(args.out)) as file:
            file.write_text(text, encoding="utf-8")
        result["output"] = args.out
    if not args.json:  # only for `render`; the JSON object holds data only
        result["_text"] = text
    return result, 1 if report.undeclared else 0


def render(result: dict[str, Any]) -> str:
    text: str = result["_text"]
    if "output" not in result:
        return text.rstrip("\n")
    counts = ", ".join(f"{n} {verdict}" for verdict, n in result["counts"].items() if n)
    undeclared = ", ".join(result["undeclared"]) or "none"
    return f"wrote {result['output']}\n{counts}\nundeclared deviations: {undeclared}"


def _audit(path: str, args: argparse.Namespace) -> Report:
    with tqdm(total=1, desc=f"audit {Path(path).name}", unit="item", file=sys.stderr, disable=None) as bar:

        def progress(done: int, total: int, title: str) -> None:
            bar.total, bar.n = total, done
            bar.set_postfix_str(title, refresh=True)

        if Path(path).suffix.lower() in (".yaml", ".yml"):
            from ..training.audit import audit_recipe  # this import takes seconds

            report = audit_recipe(path, profile=args.profile, seed=args.seed, progress=progress)
        else:
            report = _audit_checkpoint(path, args, progress)
        bar.n = bar.total
        bar.set_postfix_str("")
    return report


def _audit_checkpoint(path: str, args: argparse.Namespace, progress: Any) -> Report:
    """Audits a checkpoint in float32, so that rounding on this machine is not taken for a deviation."""
    found = open_model(path)
    declared = found.declared_deviations
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = found.load(dtype=torch.float32)
    finally:
        if bars:
            logging.enable_progress_bar()
    return audit_model(
        model,
        _tokenizer(path),
        profile=args.profile or "paper",
        declared=_without_recipes_items(as_declarations(declared, path)),
        seed=args.seed,
        progress=progress,
    )


def _without_recipes_items(declared: Sequence[Declaration]) -> Sequence[Declaration]:
    """Drops declarations about recipes, because one list may serve both a checkpoint and its training."""
    if not declared:
        return declared
    from ..training.audit.catalog import RECIPE

    of_recipes = {item.id for item in RECIPE}
    return [declaration for declaration in declared if declaration.id not in of_recipes]


def _tokenizer(path: str) -> Any:
    """Returns the checkpoint's tokenizer, or None if it lacks one: the audit also runs on random ids."""
    try:
        with reported("no tokenizer"):
            return AutoTokenizer.from_pretrained(path)
    except InPlaceTTTError:
        return None

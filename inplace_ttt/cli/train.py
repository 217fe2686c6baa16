"""Runs `inplace-ttt train RECIPE`."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..files.json_files import read_json
from ..training.loop.run_state import REPORT, finished, held
from ..training.model import meta_model
from ..training.recipe.recipe import load_recipe
from ..training.run.launch import launch
from . import Result
from .messages import say_now


def run(args: argparse.Namespace) -> Result:
    settings = list(args.set)
    if args.num_processes is not None:
        settings.append(f"parallel.nproc_per_node={args.num_processes}")
    recipe = load_recipe(args.recipe, settings)
    arguments = [args.recipe, *(part for setting in settings for part in ("--set", setting))]
    arguments += [
        flag
        for flag, given in (("--from-scratch", args.from_scratch), ("--no-audit", args.no_audit))
        if given
    ]
    meta_model(recipe)  # raises here once, instead of in every process
    output = Path(recipe.output)
    # True if this command runs once on each node
    everywhere = recipe.parallel.launcher == "torchrun" and recipe.parallel.nnodes > 1
    resume = not args.from_scratch
    # If another launcher starts the run, the run's first process locks the output.
    with held(recipe, resume) if recipe.parallel.starts_itself else nullcontext():
        before = finished(recipe) if resume else None
        if (
            before is not None and not everywhere
        ):  # on several nodes the others may not see the report, and would wait
            return {**before, "finished_before": True}, 0
        say_now()
        code = launch(recipe, arguments)
        if code or not (output / REPORT).exists():
            return {"output": None, "steps": 0, "final_loss": None, "exit_code": code}, code or (
                0 if everywhere else 1
            )
        return {**read_json(output / REPORT, "the run's report"), "finished_before": before is not None}, 0


def render(result: dict[str, Any]) -> str:
    if result["output"] is None and not result["exit_code"]:
        return "the run has ended; its report and checkpoint are on the node of process 0"
    if result["output"] is None:
        return f"the run stopped with exit code {result['exit_code']}; see its log above for the reason"
    lines = ["the run was finished before; nothing was run"] if result["finished_before"] else []
    lines.append(f"{result['steps']} steps in {result['seconds']} s, final loss {result['final_loss']:.4f}")
    evaluation = result["evaluation"]
    if "eval_difference" in evaluation:
        lines.append(
            f"held-out loss {evaluation['eval_loss']:.4f} with writes, {evaluation['eval_off_loss']:.4f} "
            "without "
            f"({evaluation['eval_difference']:+.4f})"
        )
    return "\n".join([*lines, *result["warnings"], f"trained checkpoint: {result['output']}"])

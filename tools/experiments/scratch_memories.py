"""Trains the memories from scratch, every system with every seed of a recipe, and prints one table.

    python tools/experiments/scratch_memories.py recipes/memories/scratch-recall-cpu.yaml \\
        --json docs/results/cpu-2026-11/scratch-recall.json

Each run has one JSON file, and a run with a file is skipped. So the command can be stopped at any time and
started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch
from from_scratch.settings import Scratch
from from_scratch.tasks import Task
from from_scratch.training import prepare, table, train_one
from tqdm import tqdm

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.results import Results
from inplace_ttt.files.settings import read_settings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="replace settings of the recipe"
    )
    parser.add_argument(
        "--runs", type=Path, help="folder of the runs, one JSON file each (default: runs/<recipe>)"
    )
    parser.add_argument("--json", type=Path, help="also write the table and all figures to this file")
    args = parser.parse_args()
    folder = Path("runs") / args.recipe.stem if args.runs is None else args.runs
    try:
        settings = read_settings(Scratch, args.recipe, args.set)
        task, sizes = prepare(settings)
        print_sizes(sizes)
        rows = run(settings, task, Results(folder, "name another folder with --runs"))
        lines = table(rows, settings)
        if args.json is not None:
            about = {
                "command": " ".join(["python", *sys.argv]),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
            }
            figures = {"settings": dataclasses.asdict(settings), "sizes": sizes, "table": lines, "rows": rows}
            Results(args.json.parent, "choose another --json").put(args.json.stem, {**about, **figures})
    except InPlaceTTTError as error:
        print(f"scratch_memories: {error}", file=sys.stderr)
        return 2
    print_table(lines)
    return 0


def run(settings: Scratch, task: Task, results: Results) -> list[dict[str, Any]]:
    """Runs all systems, seed by seed, so that early results already make a whole table.

    Results of other settings are refused before anything runs. A run that diverges does not stop the others;
    the error at the end names it.
    """
    todo = [(seed, system) for seed in settings.seeds for system in settings.systems]
    held = {of: results.get(f"{of[1]}-{of[0]}", asked=asked_of(settings, of[1])) for of in todo}
    rows, diverged = [], []
    with tqdm(todo, unit="run", disable=None) as bar:
        for seed, system in bar:
            found = held[seed, system]
            if found is None:
                try:
                    found = {
                        "asked": asked_of(settings, system),
                        "found": train_one(settings, task, system, seed),
                    }
                except InPlaceTTTError as error:
                    diverged.append(str(error))
                    continue
                results.put(f"{system}-{seed}", found)
            rows.append(found["found"])
    if diverged:
        raise InPlaceTTTError(" ".join(diverged))
    return rows


def asked_of(settings: Scratch, system: str) -> dict[str, Any]:
    """Returns the settings that a run depends on, apart from its seed and the other systems."""
    shared = {
        name: value
        for name, value in dataclasses.asdict(settings).items()
        if name not in ("systems", "seeds")
    }
    return {**shared, "system": system, "options": settings.systems[system]}


def print_sizes(sizes: list[dict[str, Any]]) -> None:
    for line in sizes:
        share = line["parameters"] / line["parameters_of_attention"] - 1
        print(
            f"{line['system']:17} MLP {line['width']:4}  {line['parameters']:,} parameters ({share:+.2%})",
            file=sys.stderr,
        )


def print_table(lines: list[dict[str, Any]]) -> None:
    names = list(lines[0]["scores"])
    print(
        f"{'':17} {'seeds':>5} {'parameters':>11} {'state bytes':>12} {'tokens/s':>9} "
        + " ".join(f"{name:>16}" for name in names)
    )
    for line in lines:
        scores = " ".join(f"{shown(line['scores'][name]):>16}" for name in names)
        sizes = (
            f"{line['n']:5} {line['parameters']:11,} {line['state_bytes']:12,} "
            f"{line['tokens_per_second']:9,.0f}"
        )
        print(f"{line['system']:17} {sizes} {scores}")


def shown(score: dict[str, float]) -> str:
    return f"{score['mean']:.4f}" + ("" if math.isnan(score["stderr"]) else f" ± {score['stderr']:.4f}")


if __name__ == "__main__":
    sys.exit(main())

"""Compares the times of this working tree with those of another commit, in turns.

    python tools/bench/against.py main~5
    python tools/bench/against.py v0.1 --rounds 5 -- tools/bench/bench_stretches.py --keys 1024 --json {json}

The other commit is checked out in a temporary worktree. Each round runs the same command once in each tree,
in alternating order, with the Python that runs this script. The default command is `inplace-ttt bench`. A
command prints one JSON object on stdout, or writes it to the file that replaces `{json}`. Every number under
a key that contains `seconds` is compared, or its median if it has one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = ("-m", "inplace_ttt.cli", "bench", "--json")
FILE = "{json}"


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="against.py REVISION [--rounds N] [-- ARGUMENT …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revision", help="commit, branch or tag to compare with")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each tree (default: 3)")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args, command = parser.parse_args(words[:end]), words[end + 1 :] or BENCH
    ours, theirs = list[dict[str, float]](), list[dict[str, float]]()
    with worktree(args.revision) as other:
        for number in range(args.rounds):
            turns = [(ROOT, ours), (other, theirs)]
            for tree, found in turns if number % 2 == 0 else turns[::-1]:
                found.append(times(run(tree, command)))
                print(f"round {number + 1} of {args.rounds}: {tree}", file=sys.stderr, flush=True)
    for name in ours[0]:
        if all(name in found for found in (*ours, *theirs)):
            ratios = sorted(mine[name] / its[name] for mine, its in zip(ours, theirs, strict=True))
            print(f"{statistics.median(ratios):6.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})  {name}")
    return 0


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Checks out a commit of this repository, and removes the folder afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tree"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", place, revision], check=True
        )
        try:
            if (ROOT / ".cache").exists():
                (place / ".cache").symlink_to(ROOT / ".cache")
            yield place
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", place], check=True)


def run(tree: Path, command: Sequence[str]) -> Any:
    """Runs Python with these arguments in a tree, and returns the JSON object of its figures."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        line = [sys.executable, *(word.replace(FILE, str(file)) for word in command)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(line, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"against: {' '.join(line)} failed in {tree} with exit code {done.returncode}.")
        return json.loads(file.read_text() if file.exists() else done.stdout)


def times(figures: Any, name: str = "", inside: bool = False) -> dict[str, float]:
    """Returns all times among the figures, by their path.

    Example:
        >>> times({"rows": [{"name": "linear", "seconds": {"median": 2.0, "max": 3.0}}], "threads": 1})
        {'rows linear seconds': 2.0}
    """
    if isinstance(figures, dict):
        if inside and "median" in figures:
            return times(figures["median"], name, inside)
        named = [figures["name"]] if isinstance(figures.get("name"), str) else []
        parts = [
            times(value, " ".join(filter(None, [name, *named, key])), inside or "seconds" in key)
            for key, value in figures.items()
        ]
    elif isinstance(figures, list):
        parts = [
            times(value, name if _has_name(value) else f"{name} {place}", inside)
            for place, value in enumerate(figures)
        ]
    else:
        return {name: float(figures)} if inside and isinstance(figures, int | float) else {}
    return {key: value for part in parts for key, value in part.items()}


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


if __name__ == "__main__":
    sys.exit(main())

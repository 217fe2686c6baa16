"""Compares the dual form of TTT-Linear and TTT-MLP with their primal form, in outputs and speed.

python tools/bench/bench_memories.py --json docs/results/cpu-2026-11/memories.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from inplace_ttt.memories import make


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memories", nargs="+", default=["ttt-linear", "ttt-mlp"])
    parser.add_argument("--mini-batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    rows = []
    for name in args.memories:
        for backward in (False, True):
            row = compare(name, args.mini_batch, args.length, args.dim, args.repeats, backward)
            rows.append(row)
            print(
                f"{name:10}  {row['pass']:20}  dual {row['speed_up']:.1f} times faster (of {args.repeats} "
                f"pairs: {row['least']:.1f} to "
                f"{row['most']:.1f}); largest difference {row['difference']:.1e} in float32, "
                f"{row['difference_float64']:.1e} in float64"
            )
    if args.json:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        sizes = {
            "mini_batch": args.mini_batch,
            "length": args.length,
            "dim": args.dim,
            "cpu": platform.processor(),
        }
        args.json.write_text(json.dumps({**about, **sizes, "rows": rows}, indent=1) + "\n")
    return 0


def compare(
    name: str, mini_batch: int, length: int, dim: int, repeats: int, backward: bool
) -> dict[str, Any]:
    """Times both forms in pairs, one primal and one dual after the other.

    The difference of the outputs is relative to the largest output.
    """
    torch.manual_seed(0)
    memory = make(name, dim, mini_batch=mini_batch)
    x = torch.randn(1, length, dim)
    ratios = []
    for _ in tqdm(range(repeats), desc=name, disable=None):
        primal, dual = (timed(form, x, backward) for form in (memory.primal, memory))
        ratios.append(primal / dual)
    return {
        "memory": name,
        "pass": "forward and backward" if backward else "forward",
        "speed_up": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "difference": difference(memory, x),
        "difference_float64": difference(memory.double(), x.double()),
    }


def timed(form: Callable[..., Any], x: torch.Tensor, backward: bool) -> float:
    start = time.perf_counter()
    with torch.set_grad_enabled(backward):
        y, _ = form(x)
    if backward:
        y.square().sum().backward()
    return time.perf_counter() - start


@torch.no_grad()
def difference(memory: Any, x: torch.Tensor) -> float:
    law = memory.primal(x)[0]
    return ((memory(x)[0] - law).abs().max() / law.abs().max()).item()


if __name__ == "__main__":
    sys.exit(main())

"""Times ridge regression with one factor per stretch of chunks against one factor per chunk.

    OMP_NUM_THREADS=1 python tools/bench/bench_stretches.py --json docs/results/cpu-2026-11/op-stretches.json

One document of float32, without W0. Each ratio is the median over pairs, of the process's CPU time. So other
work on the machine hardly counts. The keys have directions of decreasing size, as those of a text do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops import least_squares_walk
from inplace_ttt.ops.least_squares import fast_weight
from inplace_ttt.ops.stretches import chunks_in_stretch
from inplace_ttt.rules import RidgeRule


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d", type=int, default=576)
    parser.add_argument("--keys", type=int, nargs="+", default=[288, 512, 1024], metavar="R")
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    layout = ChunkLayout.from_lengths([[args.tokens]], args.chunk_size)
    rows = []
    for r in args.keys:
        g = torch.Generator().manual_seed(0)
        k = torch.randn(1, args.tokens, r, generator=g) * torch.logspace(0, -1.5, r)
        k, v = k / k.norm(dim=-1, keepdim=True), torch.randn(1, args.tokens, args.d, generator=g)
        chosen = chunks_in_stretch(args.chunk_size, args.d, r, k.device)
        pairs = [(seconds(chosen, k, v, layout), seconds(1, k, v, layout)) for _ in range(args.pairs + 1)]
        ratios = sorted(one / other for one, other in pairs[1:])
        rows.append(
            {
                "r": r,
                "chunks": chosen,
                "ratio": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
                "seconds": statistics.median(one for one, _ in pairs[1:]),
            }
        )
        print(
            f"{r} keys, {chosen} chunks per factor: {rows[-1]['ratio']['median']:.2f} of the time with one "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f})",
            flush=True,
        )
    if args.json:
        about = {"command": " ".join(["python", *sys.argv]), "d": args.d, "chunk_size": args.chunk_size}
        about |= {"tokens": args.tokens, "torch": torch.__version__, "threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


def seconds(chunks: int, k: Tensor, v: Tensor, layout: ChunkLayout) -> float:
    with mock.patch.object(least_squares_walk, "chunks_in_stretch", return_value=chunks):
        began = time.process_time()
        fast_weight(k, v, eta=1.0, layout=layout, rule=RidgeRule(1.0))
        return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())

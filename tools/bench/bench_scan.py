"""Counts the bytes that the scan across ranks sends, for 2, 4 and 8 ranks on this machine.

    python tools/bench/bench_scan.py --json docs/results/cpu-2026-11/scan.json

The bytes are measured on the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from inplace_ttt.layout import ChunkLayout
from inplace_ttt.ops.scan import fast_weight_across_ranks

CHUNK, TOKENS = 64, 128


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--h", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    matrix = args.d * args.h * 4
    rows = []
    for ranks in (2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, folder, args.d, args.h, args.repeats), nprocs=ranks)
            found = json.loads((Path(folder) / "found.json").read_text())
        # Both all-to-alls, forward and backward; an all-gather of the matrices would send ranks - 1 of them
        # each way.
        row = {
            "ranks": ranks,
            **{name: value / matrix for name, value in found.items()},
            "limit": 4.0,
            "all_gather": 2.0 * (ranks - 1),
        }
        rows.append(row)
        print(
            f"{ranks} ranks: each sent {row['sent']:.3f} matrices of d x h float32 for forward and backward "
            f"(tensors: {row['counted']:.3f}, limit {row['limit']:.0f}; all-gather: {row['all_gather']:.0f})"
        )
    if args.json:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "d": args.d,
            "h": args.h,
            "torch": torch.__version__,
            "cpu": platform.processor(),
        }
        args.json.write_text(json.dumps({**about, "matrix_bytes": matrix, "rows": rows}, indent=1) + "\n")
    return 0


def _rank(rank: int, ranks: int, folder: str, d: int, h: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    layout = ChunkLayout.from_lengths([[TOKENS * ranks]], CHUNK)
    z, v, weight = (
        torch.randn(*shape, requires_grad=True) for shape in ((1, TOKENS, h), (1, TOKENS, d), (d, h))
    )
    counted = 0
    original = dist.all_to_all_single

    def counting(out: Any, given: torch.Tensor, **kwargs: Any) -> Any:
        nonlocal counted
        counted += given.numel() * given.element_size() * (ranks - 1) // ranks  # a rank keeps its own part
        return original(out, given, **kwargs)

    dist.all_to_all_single = counting
    for measured in (False, True):
        counted = 0
        dist.barrier()
        time.sleep(0.2)
        before = _loopback()
        for _ in range(repeats if measured else 1):
            fast_weight_across_ranks(z, v, weight, eta=0.1, layout=layout, group=group).sum().backward()
        dist.barrier()
        time.sleep(0.2)
        sent = _loopback() - before
    if rank == 0:
        (Path(folder) / "found.json").write_text(
            json.dumps({"sent": sent / repeats / ranks, "counted": counted / repeats})
        )
    dist.barrier()
    dist.destroy_process_group()


def _loopback() -> int:
    """Returns the bytes that this machine has sent to itself."""
    line = next(
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    sys.exit(main())

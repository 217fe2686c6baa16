"""`inplace-ttt bench`"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..files.memory import require_memory
from ..ops.benchmark import LIMIT, Shape, measure
from . import Result
from .arguments import MOST_TOKENS, device, whole

EXAMPLES = """examples:
  inplace-ttt bench
  inplace-ttt bench --d 2560 --h 9728 --tokens 32768 --chunk-size 1024 --device cuda --dtype bfloat16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, most, meaning in (
        ("--d", 1024, 2**20, "hidden size"),
        ("--h", 3072, 2**20, "MLP size"),
        ("--tokens", 8192, MOST_TOKENS, "tokens of the sequence"),
        ("--chunk-size", 256, MOST_TOKENS, "tokens a chunk"),
        ("--repeats", 5, 10_000, "paired runs"),
    ):
        parser.add_argument(name, type=whole(1, most), default=default, metavar="N", help=f"{meaning} (default: {default})")
    parser.add_argument("--device", type=device, default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")


def run(args: argparse.Namespace) -> Result:
    shape = Shape(args.d, args.h, args.tokens, args.chunk_size)
    _refuse_beyond_memory(shape, args.device, getattr(torch, args.dtype))
    rows = measure(shape, args.repeats, args.device, getattr(torch, args.dtype))
    ours, public = (next(row for row in rows if row["name"] == name) for name in ("fast_weight", "materialising"))
    fits = "out_of_memory" not in public
    return {
        "shape": vars(shape),
        "device": args.device,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "limit": LIMIT,
        "speedup_over_materialising": public["seconds"]["median"] / ours["seconds"]["median"] if fits else None,
        "memory_share_of_materialising": ours["extra_peak_bytes"] / max(public["extra_peak_bytes"], 1) if fits else None,
        "rows": rows,
    }, 0


def _refuse_beyond_memory(shape: Shape, device: str, dtype: torch.dtype) -> None:
    """Inputs with their gradients; on the CPU, which has no error for it, what the materialising formulation takes too."""
    numbers = 2 * (shape.tokens * (shape.h + 2 * shape.d) + shape.d * shape.h)
    on_gpu = device.startswith("cuda")
    if not on_gpu:
        numbers += 3 * (shape.tokens // shape.chunk_size) * shape.d * shape.h
    require_memory(numbers * dtype.itemsize, "this shape", torch.cuda.mem_get_info(device)[0] if on_gpu else None)


def render(result: dict[str, Any]) -> str:
    shape = result["shape"]
    lines = [
        f"forward + backward, d {shape['d']}, h {shape['h']}, {shape['tokens']} tokens, chunks of {shape['chunk_size']}, "
        f"{result['dtype']} on {result['device']}, {result['threads']} threads",
        f"{'':15}{'seconds':>18}{'times the linear':>24}{'extra peak MiB':>17}",
    ]
    for row in result["rows"]:
        if "out_of_memory" in row:
            lines.append(f"{row['name']:15} does not fit in the GPU's memory")
            continue
        seconds, ratio = row["seconds"], row["ratio_to_linear"]
        lines.append(
            f"{row['name']:15}{seconds['median']:7.2f} ({seconds['min']:.2f}-{seconds['max']:.2f})"
            f"{ratio['median']:10.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}){row['extra_peak_bytes'] / 2**20:17.0f}"
        )
    last = f"limit {result['limit']:.2f} times the linear"
    if result["speedup_over_materialising"] is not None:
        last += (
            f"; {result['speedup_over_materialising']:.2f} times faster than materialising, "
            f"with {result['memory_share_of_materialising']:.2f} of its extra memory"
        )
    lines.append(last)
    return "\n".join(lines)

"""Runs `inplace-ttt bench` and `inplace-ttt bench --serving PATH`."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..checkpoint.reading import Checkpoint
from ..errors import InPlaceTTTError
from ..files.memory import require_memory
from ..ops.benchmark import LIMIT, Shape, measure
from . import Result
from .loading import chosen_device, open_full, require_vllm
from .messages import say_now


def run(args: argparse.Namespace) -> Result:
    return (_op if args.serving is None else _served)(args)


def _op(args: argparse.Namespace) -> Result:
    chosen_device(args.device)
    shape = Shape(args.d, args.h, args.tokens, args.chunk_size)
    _refuse_beyond_memory(shape, args.device, getattr(torch, args.dtype))
    rows = measure(shape, args.repeats, args.device, getattr(torch, args.dtype))
    ours, public = (
        next(row for row in rows if row["name"] == name) for name in ("fast_weight", "materializing")
    )
    fits = "out_of_memory" not in public
    return {
        "shape": vars(shape),
        "device": args.device,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "limit": LIMIT,
        "speedup_over_materializing": public["seconds"]["median"] / ours["seconds"]["median"]
        if fits
        else None,
        "memory_share_of_materializing": ours["extra_peak_bytes"] / max(public["extra_peak_bytes"], 1)
        if fits
        else None,
        "rows": rows,
    }, 0


def _served(args: argparse.Namespace) -> Result:
    described = open_full(args.serving).described_base
    base = args.base or described.get("name_or_path")
    if base is None:
        raise InPlaceTTTError(
            f"{args.serving} does not name the base that it was made from; name it with --base."
        )
    Checkpoint.open(base)
    require_vllm()
    from ..serving.benchmark import Load, compare

    say_now()
    load = Load(tuple(args.requests), args.prompt_tokens, args.new_tokens, args.dtype, args.repeats)
    return {"serving": str(args.serving), "base": str(base), **compare(str(args.serving), str(base), load)}, 0


def _refuse_beyond_memory(shape: Shape, device: str, dtype: torch.dtype) -> None:
    """Raises InPlaceTTTError if the inputs and their gradients exceed the memory.

    A CPU run that exceeds the memory raises no error. So the materializing formulation's memory counts there.
    """
    numbers = 2 * (shape.tokens * (shape.h + 2 * shape.d) + shape.d * shape.h)
    on_gpu = device.startswith("cuda")
    if not on_gpu:
        numbers += 3 * (shape.tokens // shape.chunk_size) * shape.d * shape.h
    require_memory(
        numbers * dtype.itemsize, "this shape", torch.cuda.mem_get_info(device)[0] if on_gpu else None
    )


def render(result: dict[str, Any]) -> str:
    return _render_served(result) if "serving" in result else _render_op(result)


def _render_served(result: dict[str, Any]) -> str:
    load = result["load"]
    lines = [
        f"Prompts of {load['prompt'] // 16} to {load['prompt']} tokens, {load['new']} new tokens each, "
        f"{load['dtype']}, {load['rounds']} rounds.",
    ]
    for found in result["by_requests"]:
        lines += [
            "",
            f"{found['requests']} concurrent requests",
            f"{'':24}{'tokens per s':>22}{'s to first token':>22}{'s per further token':>24}",
        ]
        for kind, name in _CONTENDERS.items():
            line = f"{name:24}{_spread(found['tokens_per_second'][kind]):>22}"
            if kind in found["seconds_per_token"]:
                first, further = found["seconds_to_first_token"][kind], found["seconds_per_token"][kind]
                line += f"{_spread(first, 3):>22}{_spread(further, 4):>24}"
            lines.append(line)
        lines.append(
            f"converted over the base: {_spread(found['of_base'])}; over generate: "
            f"{_spread(found['of_generate'])}"
        )
    return "\n".join(lines)


_CONTENDERS = {"base": "vLLM, the base", "converted": "vLLM, converted", "generate": "generate, one by one"}


def _spread(value: dict[str, float], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f}-{value['max']:.{digits}f})"


def _render_op(result: dict[str, Any]) -> str:
    shape = result["shape"]
    lines = [
        f"forward and backward, d {shape['d']}, h {shape['h']}, {shape['tokens']} tokens, chunks of "
        f"{shape['chunk_size']}, "
        f"{result['dtype']} on {result['device']}, {result['threads']} threads",
        f"{'':15}{'seconds':>18}{'times the linear':>24}{'forward alone':>24}{'extra peak MiB':>17}",
    ]
    for row in result["rows"]:
        if "out_of_memory" in row:
            lines.append(f"{row['name']:15} does not fit in the GPU's memory")
            continue
        cells = (row["seconds"], 18), (row["ratio_to_linear"], 24), (row["forward_ratio_to_linear"], 24)
        lines.append(
            f"{row['name']:15}{''.join(f'{_spread(value):>{width}}' for value, width in cells)}"
            f"{row['extra_peak_bytes'] / 2**20:17.0f}"
        )
    last = f"limit {result['limit']:.2f} times the linear"
    if result["speedup_over_materializing"] is not None:
        last += (
            f"; {result['speedup_over_materializing']:.2f} times faster than materializing, "
            f"with {result['memory_share_of_materializing']:.2f} of its extra memory"
        )
    lines.append(last)
    return "\n".join(lines)

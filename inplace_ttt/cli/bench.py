"""`inplace-ttt bench` and `inplace-ttt bench --serving PATH`"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..checkpoint.reading import Checkpoint
from ..errors import InPlaceTTTError
from ..files.memory import require_memory
from ..ops.benchmark import LIMIT, Shape, measure
from . import Result
from .arguments import MOST_TOKENS, device, path, whole
from .loading import open_full, require_vllm
from .messages import say_now

EXAMPLES = """examples:
  inplace-ttt bench
  inplace-ttt bench --d 2560 --h 9728 --tokens 32768 --chunk-size 1024 --device cuda --dtype bfloat16
  inplace-ttt bench --serving ./smollm2-ttt --base ./smollm2-135m --requests 16"""

_OP = {"d": 1024, "h": 3072, "tokens": 8192, "chunk_size": 256, "device": "cpu"}
_SERVING = {"base": None, "requests": 16, "prompt_tokens": 1024, "new_tokens": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    op = parser.add_argument_group("the op (default)")
    for name, least, most, meaning in (
        ("--d", 2, 2**20, "hidden size"),  # of which least squares has half as many directions
        ("--h", 1, 2**20, "MLP size"),
        ("--tokens", 1, MOST_TOKENS, "tokens of the sequence"),
        ("--chunk-size", 1, MOST_TOKENS, "tokens a chunk"),
    ):
        _number(op, name, most, meaning, _OP, least)
    op.add_argument("--device", type=device, help="cpu or cuda (default: cpu)")
    serving = parser.add_argument_group("serving by vLLM")
    serving.add_argument("--serving", type=path, metavar="PATH", help="a converted checkpoint, against its base and against generate")
    serving.add_argument("--base", type=path, metavar="B", help="the base (default: the one that the checkpoint names)")
    _number(serving, "--requests", 4096, "requests at once", _SERVING)
    _number(serving, "--prompt-tokens", MOST_TOKENS, "tokens of the longest prompt, the shortest has a sixteenth", _SERVING)
    _number(serving, "--new-tokens", MOST_TOKENS, "tokens that each generates", _SERVING)
    parser.add_argument("--repeats", type=whole(1, 10_000), default=5, metavar="N", help="paired runs (default: 5)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")


def _number(group: argparse._ArgumentGroup, name: str, most: int, meaning: str, defaults: dict[str, Any], least: int = 1) -> None:
    default = defaults[name.removeprefix("--").replace("-", "_")]
    group.add_argument(name, type=whole(least, most), metavar="N", help=f"{meaning} (default: {default})")


def run(args: argparse.Namespace) -> Result:
    mine, others = (_OP, _SERVING) if args.serving is None else (_SERVING, _OP)
    if idle := [name for name in others if getattr(args, name) is not None]:
        with_or_without = "without" if args.serving is None else "with"
        raise InPlaceTTTError(f"--{idle[0].replace('_', '-')} has no effect {with_or_without} --serving; leave it out.")
    for name, default in mine.items():
        setattr(args, name, default if getattr(args, name) is None else getattr(args, name))
    return (_op if args.serving is None else _served)(args)


def _op(args: argparse.Namespace) -> Result:
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


def _served(args: argparse.Namespace) -> Result:
    checkpoint = open_full(args.serving)
    assert checkpoint.section is not None
    base = args.base or (checkpoint.section.get("base") or {}).get("name_or_path")
    if base is None:
        raise InPlaceTTTError(f"{args.serving} does not say which base it stands on; name it with --base.")
    Checkpoint.open(base)
    require_vllm()
    from ..serving.benchmark import Load, compare

    say_now()
    load = Load(args.requests, args.prompt_tokens, args.new_tokens, args.dtype, args.repeats)
    return {"serving": str(args.serving), "base": str(base), **compare(str(args.serving), str(base), load)}, 0


def _refuse_beyond_memory(shape: Shape, device: str, dtype: torch.dtype) -> None:
    """Inputs with their gradients; on the CPU, which has no error for it, what the materialising formulation takes too."""
    numbers = 2 * (shape.tokens * (shape.h + 2 * shape.d) + shape.d * shape.h)
    on_gpu = device.startswith("cuda")
    if not on_gpu:
        numbers += 3 * (shape.tokens // shape.chunk_size) * shape.d * shape.h
    require_memory(numbers * dtype.itemsize, "this shape", torch.cuda.mem_get_info(device)[0] if on_gpu else None)


def render(result: dict[str, Any]) -> str:
    return _render_served(result) if "serving" in result else _render_op(result)


def _render_served(result: dict[str, Any]) -> str:
    load, rates, waits = result["load"], result["tokens_per_second"], result["seconds_a_request"]
    lines = [
        f"{load['requests']} requests at once, prompts of {load['prompt'] // 16} to {load['prompt']} tokens, {load['new']} new each, "
        f"{load['dtype']}, {load['rounds']} rounds",
        f"{'':24}{'tokens a second':>24}{'seconds a request':>24}",
    ]
    for kind, name in (("base", "vLLM, the base"), ("converted", "vLLM, converted"), ("generate", "generate, one by one")):
        lines.append(f"{name:24}{_spread(rates[kind]):>24}{_spread(waits[kind]):>24}")
    lines.append(f"converted over the base: {_spread(result['of_base'])}; over generate: {_spread(result['of_generate'])}")
    return "\n".join(lines)


def _spread(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['min']:.2f}-{value['max']:.2f})"


def _render_op(result: dict[str, Any]) -> str:
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

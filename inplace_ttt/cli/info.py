"""`inplace-ttt info PATH`"""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpoint import Checkpoint, is_adapter, read_adapter
from . import Result

EXAMPLES = """examples:
  inplace-ttt info ./smollm2-ttt
  inplace-ttt info ./llama-ttt --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="converted checkpoint or adapter folder")


def run(args: argparse.Namespace) -> Result:
    base: dict[str, Any] | None
    if is_adapter(args.path):
        config, base, tensors = read_adapter(args.path)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        checkpoint = Checkpoint.open(base["name_or_path"])
        form = "adapter"
    else:
        checkpoint = Checkpoint.open(args.path)
        config = checkpoint.ttt_config
        assert checkpoint.section is not None
        base = checkpoint.section.get("base")
        shapes = {name: checkpoint.shape_and_dtype(name)[0] for name in checkpoint.ttt_names()}
        form = "full"
    weights = {name.partition("ttt.")[0] + "weight" for name in shapes}
    sizes = [checkpoint.shape_and_dtype(name)[0] for name in sorted(weights)]
    return {
        "form": form,
        "layers": list(config.layers),
        "config": config.to_dict(),
        "base": base,
        "fast_weight": sizes[0],
        "new_parameters": sum(_count(shape) for shape in shapes.values()),
        "state_bytes_per_sequence": 4 * sum(_count(shape) for shape in sizes),
    }, 0


def render(result: dict[str, Any]) -> str:
    config = result["config"]
    base = result["base"] or {}
    return "\n".join(
        [
            f"In-Place TTT checkpoint ({result['form']}), base {base.get('name_or_path', 'unknown')}",
            f"layers           {', '.join(map(str, result['layers']))}",
            f"chunk size       {config['chunk_size']} tokens",
            f"eta              {config['eta']}",
            f"target           {config['target']}, {config['conv']} convolution of {config['kernel_size']}",
            f"clip             {config['clip'] or 'none'}",
            f"fast weight      {' x '.join(map(str, result['fast_weight']))} a layer",
            f"new parameters   {result['new_parameters']:,}",
            f"state            {result['state_bytes_per_sequence'] / 2**20:.1f} MiB a sequence (float32)",
        ]
    )


def _count(shape: list[int]) -> int:
    return shape[0] * _count(shape[1:]) if shape else 1

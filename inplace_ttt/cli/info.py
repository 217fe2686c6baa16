"""`inplace-ttt info PATH`"""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..checkpoint.adapter import is_adapter, read_adapter
from ..checkpoint.reading import Checkpoint, parameters_of
from ..checkpoint.writing import empty_model, plan_conversion
from ..config import InPlaceTTTConfig
from ..families import features
from ..surgery import fast_weights
from . import Result
from .arguments import path

EXAMPLES = """examples:
  inplace-ttt info ./smollm2-ttt
  inplace-ttt info ./llama-ttt --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    parser.add_argument("--base", type=path, metavar="B", help="where an adapter's base is, if not where it was")


def run(args: argparse.Namespace) -> Result:
    base: dict[str, Any] | None
    if adapter := is_adapter(args.path):
        config, base, tensors = read_adapter(args.path)
        checkpoint = Checkpoint.open(args.base or base["name_or_path"])
        model = plan_conversion(checkpoint, config).model
    else:
        checkpoint = Checkpoint.open(args.path)
        config, tensors, model = checkpoint.ttt_config, checkpoint.ttt_tensors(), empty_model(checkpoint)[1]
        assert checkpoint.section is not None
        base = checkpoint.section.get("base")
    sizes = [(d, h) for h, d in map(features, fast_weights(model).values())]  # on disk they may be quantised
    return {
        "form": "adapter" if adapter else "full",
        "layers": list(config.layers),
        "config": config.to_dict(),
        "base": base,
        "fast_weight": sizes[0],
        "fast_weights": sizes,
        "new_parameters": parameters_of(tensors),
        "measured": sum(tensor.numel() for pair in tensors.values() for tensor in pair.values()) - parameters_of(tensors),
        "state_bytes_per_sequence": 4 * sum(math.prod(config.state_shape(d, h)) for d, h in sizes),
    }, 0


def render(result: dict[str, Any]) -> str:
    config = result["config"]
    base = result["base"] or {}
    extensions = [f"{name} {value}" for name, value in InPlaceTTTConfig.from_dict(config).extensions.items()]
    return "\n".join(
        [
            f"In-Place TTT checkpoint ({result['form']}), base {base.get('name_or_path', 'unknown')}",
            f"layers           {', '.join(map(str, result['layers']))}",
            f"chunk size       {config['chunk_size']} tokens",
            f"eta              {config['eta']}",
            f"target           {config['target']}, " + _mixing(config),
            f"clip             {config['clip'] or 'none'}",
            f"fast weight      {' and '.join(f'{d} x {h}' for d, h in dict.fromkeys(map(tuple, result['fast_weights'])))} a layer",
            f"extensions       {', '.join(extensions) or 'none'}",
            f"new parameters   {result['new_parameters']:,}"
            + (f", and {result['measured']:,} measured numbers" if result["measured"] else ""),
            f"state            {result['state_bytes_per_sequence'] / 2**20:.1f} MiB a sequence (float32)",
        ]
    )


def _mixing(config: dict[str, Any]) -> str:
    return "the next token's" if config["conv"] == "next" else f"{config['conv']} convolution of {config['kernel_size']}"

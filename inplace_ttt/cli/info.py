"""Runs `inplace-ttt info PATH`."""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpoint.layer_tensors import parameters_of
from ..checkpoint.opened import open_model
from ..config import InPlaceTTTConfig
from ..families import features
from ..surgery import fast_weights
from . import Result


def run(args: argparse.Namespace) -> Result:
    found = open_model(args.path, args.base)
    conversion = found.conversion()
    config, tensors = conversion.config, conversion.tensors
    # taken from the model, because weights on disk may be quantized
    sizes = [(d, h) for h, d in map(features, fast_weights(conversion.model).values())]
    return {
        "form": found.form,
        "layers": list(config.layers),
        "config": config.to_dict(),
        "base": conversion.base,
        "fast_weight": sizes[0],
        "fast_weights": sizes,
        "new_parameters": parameters_of(tensors),
        "measured": sum(tensor.numel() for pair in tensors.values() for tensor in pair.values())
        - parameters_of(tensors),
        "state_bytes_per_sequence": config.state_bytes(sizes),
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
            "fast weight      "
            f"{' and '.join(f'{d} x {h}' for d, h in dict.fromkeys(map(tuple, result['fast_weights'])))} "
            "per layer",
            f"extensions       {', '.join(extensions) or 'none'}",
            f"new parameters   {result['new_parameters']:,}"
            + (f", and {result['measured']:,} measured numbers" if result["measured"] else ""),
            f"state            {result['state_bytes_per_sequence'] / 2**20:.1f} MiB per sequence (float32)",
        ]
    )


def _mixing(config: dict[str, Any]) -> str:
    return (
        "the next token's"
        if config["conv"] == "next"
        else f"{config['conv']} convolution of {config['kernel_size']}"
    )

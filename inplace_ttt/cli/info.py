"""`inplace-ttt info PATH`"""

from __future__ import annotations

import argparse
import math
from typing import Any

from transformers import PreTrainedModel

from ..checkpoint.adapter import is_adapter, located, read_adapter
from ..checkpoint.lora import standing_on
from ..checkpoint.reading import Checkpoint, LayerTensors, is_peft_adapter, parameters_of
from ..checkpoint.writing import describe_base, empty_model, plan_conversion
from ..config import InPlaceTTTConfig
from ..families import features
from ..surgery import fast_weights
from . import Result
from .loading import refuse_base_of_none


def run(args: argparse.Namespace) -> Result:
    refuse_base_of_none(args.path, args.base)
    form, config, base, tensors, model = _read(args.path, args.base)
    sizes = [(d, h) for h, d in map(features, fast_weights(model).values())]  # on disk they may be quantised
    return {
        "form": form,
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


def _read(path: str, base: str | None) -> tuple[str, InPlaceTTTConfig, Any, LayerTensors, PreTrainedModel]:
    """Form, config, what it says of its base, new tensors, and the model on the meta device. base: where an adapter's is now."""
    if is_peft_adapter(path):
        source, surgery = standing_on(path, base)
        if surgery is None:
            return "lora", *_read(source, None)[1:]
        checkpoint = Checkpoint.open(source)
        plan = plan_conversion(checkpoint, surgery)
        new = {index: dict(layer.ttt.state_dict()) for index, layer in fast_weights(plan.model).items()}
        return "lora", plan.config, describe_base(checkpoint, plan), new, plan.model
    if is_adapter(path):
        config, described, tensors = read_adapter(path)
        checkpoint = Checkpoint.open(base or located(path, described["name_or_path"]))
        return "adapter", config, described, tensors, plan_conversion(checkpoint, config).model
    checkpoint = Checkpoint.open(path)
    config, tensors = checkpoint.ttt_config, checkpoint.ttt_tensors()
    assert checkpoint.section is not None
    return "full", config, checkpoint.section.get("base"), tensors, empty_model(checkpoint)[1]


def _mixing(config: dict[str, Any]) -> str:
    return "the next token's" if config["conv"] == "next" else f"{config['conv']} convolution of {config['kernel_size']}"

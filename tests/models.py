"""Converted tiny models with the writer turned on, and what the law tests compare them by."""

from collections.abc import Sequence
from typing import Any

import torch
from families import FAMILIES, UNLISTED, build
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from inplace_ttt import InPlaceTTTConfig, KeyWhitening, calibrate, convert
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import config_of, fast_weights

LAYERS = (0, 2)
CHUNK = 7
NAMES = tuple(family.name for family in FAMILIES + UNLISTED)


def converted(
    name: str, dtype: torch.dtype = torch.float32, writes: bool = True, **config: Any
) -> PreTrainedModel:
    """One family, converted at layers 0 and 2 with chunks of 7 tokens; `writes` turns the writer on."""
    settings: dict[str, Any] = {"layers": LAYERS, "chunk_size": CHUNK, **config}
    model = convert(build(name, dtype=dtype), InPlaceTTTConfig(**settings))
    if config_of(model).needs_calibration:
        calibrate(model, [random_ids(1, 64, seed=2)])
    if writes:
        turn_writer_on(model)
    return model


RIDGE: dict[str, Any] = {
    "update_rule": "ridge", "ridge": 0.5, "whitening": KeyWhitening(0.75), "normalize_targets": True,
    "proj_init": "calibrated", "eta": 10.0,
    "write_gate": True,
}  # fmt: skip
"""As the preset, with writes that show, and a gate of them."""


def seven_layers(seed: int = 0, **config: Any) -> PreTrainedModel:
    """A Llama with 7 layers, converted as the config says (TTT in 0 and 6), its writer as conversions start
    it."""
    model = convert(
        build("llama", num_hidden_layers=7, seed=seed, max_position_embeddings=65536),
        InPlaceTTTConfig(**config),
    )
    if config_of(model).needs_calibration:
        calibrate(model, [random_ids(1, 64, seed=2)])
    return model


@torch.no_grad()
def turn_writer_on(model: nn.Module) -> None:
    """Random conv, proj and gate of writes, as if trained, so that five chunks move the logits by about one
    standard deviation."""
    generator, of_gates = (torch.Generator().manual_seed(seed) for seed in (7, 8))
    for layer in fast_weights(model).values():
        for parameter, std in ((layer.ttt.conv, 0.003), (layer.ttt.proj, 0.18)):
            if parameter is None:  # conv="next"; a tap less of 0.003 wants a smaller η
                continue
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        if layer.ttt.gate is not None:
            layer.ttt.gate.copy_(torch.randn(layer.ttt.gate.shape, generator=of_gates))


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids, none of them special."""
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **kwargs: Any) -> Tensor:
    """Logits of one call, without a cache unless told otherwise."""
    return model(input_ids=ids, **{"use_cache": False, **kwargs}).logits


@torch.no_grad()
def streamed(model: nn.Module, ids: Tensor, pieces: Sequence[int]) -> Tensor:
    """Logits of `ids` read through one cache in pieces of the given lengths."""
    assert sum(pieces) == ids.shape[1]
    cache = DynamicCache(config=model.config)
    return torch.cat(
        [
            model(input_ids=piece, **{CACHE: cache}, use_cache=True).logits
            for piece in ids.split(list(pieces), 1)
        ],
        1,
    )


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry of `b`."""
    assert a.shape == b.shape and a.isfinite().all() and b.isfinite().all()
    if a.numel() == 0:
        return 0.0
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()


def hooks_of(model: nn.Module) -> list[str]:
    """The modules that carry forward hooks."""
    return [
        name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks
    ]

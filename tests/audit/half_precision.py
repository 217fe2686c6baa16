"""A hundred sound models in half precision, which the audit may raise no alarm about: `python -m
audit.half_precision`."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import torch
from families import FAMILIES, build
from models import random_ids
from peft import LoraConfig, get_peft_model
from torch import nn

from inplace_ttt import InPlaceTTTConfig, calibrate, convert
from inplace_ttt.audit import audit_model
from inplace_ttt.surgery import config_of

SETTINGS: dict[str, set[str]] = {
    "paper": {"layer-spacing"},
    "reference": {"layer-spacing", "chunk-size", "target-source"},
    "ridge": {"layer-spacing", "chunk-size"},
    "ttt_ntp": {"layer-spacing", "chunk-size", "target-source", "extensions"},
}
"""Items in which a preset's settings, and the few layers of a small model, deviate from the paper."""
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Model:
    """One sound model. depth: its decoder layers. lora: whether a LoRA adapter with drawn weights stands
    around its projections."""

    family: str
    preset: str
    dtype: torch.dtype
    seed: int
    depth: int = 3
    lora: bool = False

    def __str__(self) -> str:
        size = f"{self.depth} layers" + (", LoRA" if self.lora else "")
        return (
            f"{self.family}, {self.preset}, {str(self.dtype).removeprefix('torch.')}, {size}, seed "
            f"{self.seed}"
        )

    def alarms(self) -> dict[str, str]:
        """Undeclared deviations that are none of the settings', by item."""
        name = "n_layer" if self.family in ("gpt2", "gpt_bigcode", "gptj", "codegen") else "num_hidden_layers"
        layers = tuple(range(0, self.depth, 2 if self.depth < 12 else 6))
        base = build(
            self.family, dtype=self.dtype, seed=self.seed, **({name: self.depth} if self.depth != 3 else {})
        )
        model: nn.Module = convert(base, InPlaceTTTConfig.preset(self.preset, layers=layers))
        if config_of(model).needs_calibration:
            calibrate(model, [random_ids(1, 256, seed=self.seed + 2)])
        if self.lora:
            model = _with_lora(model, self.seed)
        report = audit_model(model, seed=self.seed)
        return {id: report[id].outcome.found for id in report.undeclared if id not in SETTINGS[self.preset]}


def _with_lora(model: nn.Module, seed: int) -> nn.Module:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"]))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = (0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter)
    return adapted


def models() -> list[Model]:
    """A hundred: every family by two presets and both dtypes, then other seeds, 25 layers, and LoRA."""
    presets = itertools.cycle(("reference", "paper", "ridge"))
    found = [Model(family.name, next(presets), dtype, 0) for family in FAMILIES for dtype in HALF]
    found += [
        Model("llama", preset, dtype, seed) for seed in (1, 2, 3) for dtype in HALF for preset in SETTINGS
    ]
    found += [Model("llama", preset, dtype, 4, depth=25) for preset in SETTINGS for dtype in HALF]
    found += [Model("qwen3", preset, dtype, 5, lora=True) for preset in SETTINGS for dtype in HALF]
    others = itertools.product((6, 7, 8), ("qwen3", "gemma3", "mistral"), HALF, ("reference", "paper"))
    found += [Model(family, preset, dtype, seed) for seed, family, dtype, preset in others]
    return found[:100]


def main() -> int:
    """Audit all, print the alarms, return how many models raised one."""
    alarmed = 0
    for model in models():
        if alarms := model.alarms():
            alarmed += 1
            print(f"{model}: {alarms}", flush=True)
    print(f"{alarmed} of {len(models())} sound models raised an alarm")
    return alarmed


if __name__ == "__main__":
    sys.exit(bool(main()))

"""No false alarm: sound conversions of twenty families, biases drawn large, by three presets, deviate in
nothing but their settings."""

from typing import Any

import pytest
import torch
from families import FAMILIES, build
from laws.test_every_family import build as build_by_structure
from models import random_ids
from transformers import PreTrainedModel
from vision_language import CONFIGS as VISION_LANGUAGE
from vision_language import build as build_vision_language

from inplace_ttt import InPlaceTTTConfig, calibrate, convert
from inplace_ttt.audit import audit_model
from inplace_ttt.surgery import config_of, fast_weights

LISTED = [family.name for family in FAMILIES]
BY_STRUCTURE = ["opt", "bloom", "nemotron"]
SETTINGS: dict[str, set[str]] = {
    "paper": {"layer-spacing"},
    "reference": {"layer-spacing", "chunk-size", "target-source"},
    "ridge": {"layer-spacing", "chunk-size"},
}
"""By preset, what its settings and the few layers of a small model deviate in."""
CONFIGURATIONS = [
    (name, preset, share)
    for number, name in enumerate([*LISTED, *BY_STRUCTURE])
    for preset, share in (("paper", 0.2), (("reference", "ridge")[number % 2], 2.0))
]


def with_biases(model: PreTrainedModel, share: float) -> None:
    """Biases drawn, those of down-projections of that share of their weight's norm."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    for layer in fast_weights(model).values():
        bias: Any = getattr(layer, "bias", None)
        if bias is not None:
            bias.data *= share * torch.linalg.vector_norm(layer.weight) / torch.linalg.vector_norm(bias)  # type: ignore[arg-type]


def test_they_are_forty_of_twenty_families() -> None:
    assert len(CONFIGURATIONS) >= 40 and len({name for name, _, _ in CONFIGURATIONS}) >= 20


@pytest.mark.parametrize(("name", "preset", "share"), CONFIGURATIONS)
@pytest.mark.sample(1)
def test_a_sound_conversion_raises_no_alarm(name: str, preset: str, share: float) -> None:
    base = build(name) if name in LISTED else build_by_structure(name)
    layers = (0, 2) if name in LISTED else (0, 1)
    model = convert(base, InPlaceTTTConfig.preset(preset, layers=layers))
    if config_of(model).needs_calibration:
        calibrate(model, [random_ids(1, 256, seed=2)])
    with_biases(model, share)
    report = audit_model(model)
    assert {id: report[id].outcome.found for id in report.undeclared if id not in SETTINGS[preset]} == {}


@pytest.mark.parametrize("name", VISION_LANGUAGE)
@pytest.mark.full
def test_a_vision_language_model_raises_no_alarm(name: str) -> None:
    report = audit_model(
        convert(build_vision_language(name), InPlaceTTTConfig.preset("paper", layers=(0, 2)))
    )
    assert {id: report[id].outcome.found for id in report.undeclared if id not in SETTINGS["paper"]} == {}

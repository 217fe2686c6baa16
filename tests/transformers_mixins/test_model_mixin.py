"""transformers' own tests of a model, ModelTesterMixin, over converted models: what passes for the base
passes, or is listed.

The tests are those of the installed version, from its source distribution
(tools/fetch/get_transformers_tests.py). That one holds neither GenerationTesterMixin nor ExportTesterMixin,
which the file of ModelTesterMixin imports: classes without tests stand in for them. In place of the first
there are tests/session/test_generate.py (every way of decoding) and the laws L2, L4 and L11; the second
exports models to other formats, which converted ones do not promise.

The writer is on, so that the tests are about memory too. Left out, since they take time and are not about us:
loading in each dtype under the argument's old name, and the comparisons of attentions that are made again
with torch's own kernels allowed.
"""

import functools
import importlib
import sys
import types
import unittest
from pathlib import Path

import pytest
import torch
from families import BY_NAME, config_for
from models import distance, logits, random_ids
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from inplace_ttt import InPlaceTTTConfig, disable_ttt
from inplace_ttt.converted_config import carrying_class, section
from inplace_ttt.layer.target import TargetGenerator

FOLDER = Path(__file__).parents[2] / ".cache" / "transformers-tests"
NAMES = ["llama", "qwen3", "gemma3", "gpt2"]
# Name -> what our refusal says, and what the test does that we refuse.
DIFFERS = {
    "test_base_model_prefix_loads_base_weights": (
        "half a checkpoint",
        "saves a decoder that it made by the base's own class",
    ),
    "test_can_init_all_missing_weights": ("half a checkpoint", "loads a state dict without tensors"),
    "test_correct_missing_keys": (
        "half a checkpoint",
        "loads a language model from a folder without its head",
    ),
    "test_model_weights_reload_no_missing_tied_weights": (
        "half a checkpoint",
        "loads a folder whose tensors it took away",
    ),
    "test_training_gradient_checkpointing_use_reentrant_true": (
        "use_reentrant",
        "recomputes in a way that loses the targets' gradient",
    ),
}
LEFT_OUT = "test_bc_torch_dtype", "_sdpa_kernels"


@functools.cache
def mixins() -> tuple[type, ...]:
    """ModelTesterMixin, and the empty class that stands in for GenerationTesterMixin."""
    assert FOLDER.exists(), "run `make transformers-tests` first"
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(FOLDER)]
    sys.modules[package.__name__] = package
    for path, name in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        stand_in = types.ModuleType(f"{package.__name__}.{path}")
        setattr(stand_in, name, type(name, (), {}))
        sys.modules[stand_in.__name__] = stand_in
    common = importlib.import_module(f"{package.__name__}.test_modeling_common")
    return common.ModelTesterMixin, common.GenerationTesterMixin


class Inputs:
    """What the mixin asks about a family: a tiny config, with fast weights or without, and inputs for it."""

    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads, is_training = (
        3,
        11,
        32,
        2,
        4,
        True,
    )

    def __init__(self, family: str, converted: bool) -> None:
        self.row, self.converted = BY_NAME[family], converted

    def get_config(self) -> PreTrainedConfig:
        layers = "n_layer" if "n_layer" in self.row.overrides else "num_hidden_layers"
        plain = config_for(
            self.row, initializer_range=0.02, tie_word_embeddings=False, **{layers: self.num_hidden_layers}
        )
        if not self.converted:
            return plain
        ours = InPlaceTTTConfig(layers=(0,), chunk_size=4)
        return carrying_class(type(plain))(**plain.to_dict(), inplace_ttt=section(plain.model_type, ours))

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        ids = random_ids(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def case_of(family: str, converted: bool) -> type[unittest.TestCase]:
    tester = Inputs(family, converted)
    classes = [
        auto._model_mapping[type(tester.get_config())]
        for auto in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification)
    ]
    settings = {
        "model_tester": tester,
        "all_model_classes": tuple(classes),
        "test_can_init_all_missing_weights_before_2023": True,
    }
    return type(f"{family} {'converted' if converted else 'base'}", (*mixins(), unittest.TestCase), settings)


def not_passed(case: type[unittest.TestCase], name: str) -> str:
    """Why a test failed or skipped itself; nothing if it passed."""
    result = unittest.TestResult()
    case(name).run(result)
    return "".join(why for _, why in (*result.errors, *result.failures, *result.skipped))


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """New parameters are as if trained."""

    @torch.no_grad()
    def reset(target: TargetGenerator, std: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in target.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    monkeypatch.setattr(TargetGenerator, "reset_parameters", reset)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.sample(1)
def test_what_passes_for_the_base_passes_converted(family: str, writing: None) -> None:
    base, ours = case_of(family, converted=False), case_of(family, converted=True)
    model, ids = ours.all_model_classes[1](ours.model_tester.get_config()).eval(), random_ids(3, 11)
    with disable_ttt(model):
        without = logits(model, ids)
    assert distance(logits(model, ids), without) > 0.01, (
        "the writes must be visible for this test to mean anything"
    )
    names = [
        name for name in unittest.defaultTestLoader.getTestCaseNames(ours) if not name.endswith(LEFT_OUT)
    ]
    ran = {name: not_passed(ours, name) for name in names}
    unlike = {name: why for name, why in ran.items() if why and not not_passed(base, name)}
    unlisted = [
        f"{name}: {why}" for name, why in unlike.items() if name not in DIFFERS or DIFFERS[name][0] not in why
    ]
    assert not unlisted, "\n\n".join(unlisted)
    assert unlike.keys() == DIFFERS.keys(), "these pass now; take them off the list"
    assert sum(not why for why in ran.values()) > 80

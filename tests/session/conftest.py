"""Converted models that the state tests share; gemma3 and qwen3 have a sliding window of 16."""

import pytest
from models import RIDGE, converted
from transformers import PreTrainedModel

NAMES = ("llama", "gemma3", "gpt2", "gpt_neox", "qwen3")


@pytest.fixture(scope="module", params=[*NAMES, "least squares"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return converted("llama", **RIDGE) if request.param == "least squares" else converted(request.param)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return converted("llama")

"""Converted models that the state tests share; gemma3 and qwen3 have a sliding window of 16."""

import pytest
from models import converted
from transformers import PreTrainedModel

NAMES = ("llama", "gemma3", "gpt2", "gpt_neox", "qwen3")


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return converted(request.param)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return converted("llama")

"""No false alarm in half precision: a sample of a hundred sound models, or all of them with
`HALF_PRECISION=all`."""

import os

import pytest
import torch

from audit.half_precision import Model, models

STEP = 1 if os.environ.get("HALF_PRECISION") == "all" else 25


@pytest.mark.parametrize("model", models()[::STEP], ids=str)
@pytest.mark.full
def test_a_sound_model_raises_no_alarm(model: Model) -> None:
    assert model.alarms() == {}


def test_they_are_a_hundred_of_each_sort() -> None:
    found = models()
    assert len(found) == len({str(model) for model in found}) == 100
    assert any(model.depth == 25 for model in found) and any(model.lora for model in found)
    assert {model.dtype for model in found} == {torch.bfloat16, torch.float16} and len(
        {model.family for model in found}
    ) >= 15

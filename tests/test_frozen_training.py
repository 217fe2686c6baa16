"""A training in which a fresh conversion can never begin to write is warned of, by the model itself, in any
trainer."""

import logging
from collections.abc import Callable

import pytest
import torch
from families import build
from models import random_ids, turn_writer_on
from peft import LoraConfig, get_peft_model
from torch import nn

from inplace_ttt import InPlaceTTTConfig, convert
from inplace_ttt.surgery import fast_weights

SAID = "will never write into its fast weights"


def converted(**settings: object) -> nn.Module:
    return convert(build("llama"), InPlaceTTTConfig(layers=(0, 2), chunk_size=8, **settings))  # type: ignore[arg-type]


def lora(model: nn.Module, **settings: object) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=2, **settings))  # type: ignore[arg-type]


def all_linear(model: nn.Module) -> nn.Module:
    """As LLaMA-Factory and ms-swift choose it."""
    return lora(model, target_modules="all-linear")


def named(model: nn.Module) -> nn.Module:
    return lora(model, target_modules=["q_proj", "v_proj", "down_proj"])


def attention_alone(model: nn.Module) -> nn.Module:
    return lora(model, target_modules=["q_proj"])


def frozen_by_hand(model: nn.Module) -> nn.Module:
    for layer in fast_weights(model).values():
        layer.ttt.requires_grad_(False)
    return model


def embeddings_alone(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)  # type: ignore[operator]
    return model


def with_ttt(model: nn.Module) -> nn.Module:
    return lora(model, target_modules=["q_proj"], modules_to_save=["ttt"])


def nothing_at_all(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def trained_before(model: nn.Module) -> nn.Module:
    turn_writer_on(model)
    return attention_alone(model)


def step(model: nn.Module, **how: bool) -> None:
    model.train(how.get("training", True))
    with torch.set_grad_enabled(how.get("grad", True)):
        model(input_ids=random_ids(1, 20), labels=random_ids(1, 20))


@pytest.mark.parametrize(
    "prepare",
    [all_linear, named, attention_alone, frozen_by_hand, embeddings_alone],
    ids=lambda f: f.__name__,
)
def test_a_training_without_writes_is_warned_of_once(
    prepare: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = prepare(converted())
    step(model, training=False)
    step(model, grad=False)
    assert SAID not in caplog.text, "it is not trained yet"
    for _ in range(2):
        step(model)
    (record,) = (record for record in caplog.records if SAID in record.message)
    assert record.levelno == logging.WARNING


@pytest.mark.parametrize(
    "prepare", [as_it_is, with_ttt, nothing_at_all, trained_before], ids=lambda f: f.__name__
)
def test_a_training_with_writes_is_not(
    prepare: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    step(prepare(converted()))
    assert SAID not in caplog.text


def test_targets_that_need_no_convolution_write_anyhow(caplog: pytest.LogCaptureFixture) -> None:
    step(attention_alone(converted(conv="next")))
    assert SAID not in caplog.text

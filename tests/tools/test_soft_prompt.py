"""The soft prompt beside which writes are measured: every token sees it, in one call as in pieces, and it
learns."""

import pytest
import soft_prompt
import torch
from datasets import Dataset
from families import build
from models import random_ids
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from inplace_ttt.attention_window import attention_window, window_cache
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.families import CACHE
from inplace_ttt.training.recipe.recipe import load_recipe

PREFIX, WINDOW, SINKS = 5, 16, soft_prompt.SINKS


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    for name, value in {"PREFIX": PREFIX, "WINDOW": WINDOW, "CHUNK": 8}.items():
        monkeypatch.setattr(soft_prompt, name, value)
    return build("llama").eval().requires_grad_(False)


def test_in_pieces_as_in_one_call(model: PreTrainedModel) -> None:
    ids = random_ids(1, 60)
    prompt = soft_prompt.SoftPrompt(model, random_ids(1, 60, seed=1))
    cache = window_cache(model, WINDOW, PREFIX + SINKS)
    with torch.no_grad(), attention_window(model, WINDOW, PREFIX + SINKS):
        prompt.put_into(cache, model)
        logits = model(ids, **{CACHE: cache}, use_cache=True).logits
    whole = cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    assert torch.allclose(soft_prompt.read(model, ids, prompt)[0], whole, atol=1e-4)
    with torch.no_grad():
        without = token_losses(model, ids, piece=8, window=WINDOW, sinks=SINKS)
    assert not torch.allclose(without[0, 40:], whole[40:], atol=1e-3)


def test_a_trained_one_predicts_its_rows_better(model: PreTrainedModel) -> None:
    rows = Dataset.from_list(
        [{"input_ids": (ids := random_ids(1, 48, seed=7)[0].tolist()), "labels": ids}] * 40
    )
    recipe = load_recipe(
        soft_prompt.RECIPE, ["training.steps=20", "training.warmup_steps=0", "training.learning_rate=0.1"]
    )
    before = [parameter.clone() for parameter in model.parameters()]
    prompt, losses = soft_prompt.trained(model, recipe, rows)
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.05
    ids = torch.tensor([rows[0]["input_ids"]])
    untrained = soft_prompt.SoftPrompt(model, ids)
    assert soft_prompt.read(model, ids, prompt).mean() < soft_prompt.read(model, ids, untrained).mean() - 0.05
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

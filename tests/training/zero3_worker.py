"""One process under DeepSpeed's ZeRO-3: builds the model of each recipe given, trains it a little, prints
JSON."""

import json
from typing import Any

import deepspeed
import torch
from models import random_ids
from transformers.integrations import HfDeepSpeedConfig

from inplace_ttt.layer.zero3 import gathered, is_partitioned
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.recipe import load_recipe

ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 1,
}


def report(recipe: str) -> dict[str, Any]:
    """Sums of |p| of every parameter as built, and the losses of three steps."""
    model = build_model(load_recipe(recipe))
    assert all(is_partitioned(layer.weight) for layer in fast_weights(model).values())
    with gathered(model.parameters()):
        values = {name: p.double().abs().sum().item() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**ZERO3, "zero_force_ds_cpu_optimizer": False}
    )
    engine.train()
    ids, losses = random_ids(1, 64), []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"values": values, "losses": losses}


def main(recipes: list[str]) -> None:
    deepspeed.init_distributed("gloo")
    keep = HfDeepSpeedConfig({**ZERO3, "train_batch_size": 1})
    print("RESULT " + json.dumps([report(recipe) for recipe in recipes]))
    del keep

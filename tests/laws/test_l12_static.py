"""L12, decoding: with a static cache one graph reads every position, and gives the tokens of a dynamic cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import RIDGE, converted, distance, random_ids
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel, StaticCache

from inplace_ttt import disable_ttt
from inplace_ttt.families import CACHE

RULES: dict[str, dict[str, Any]] = {"paper": {}, "ridge": RIDGE}
SLIDING = {"gemma3", "qwen3"}
"""transformers compiles these for the first token, inside the window, and behind its end."""


def in_one_graph() -> CompileConfig:
    settings = CompileConfig(fullgraph=True, backend="aot_eager")
    settings._compile_all_devices = True  # transformers compiles on GPUs alone
    return settings


@pytest.fixture(autouse=True)
def no_graphs_before() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("new", [40, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize("rows", ["one", "two", "left-padded"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "gpt2", "gpt_neox"])
@pytest.mark.sample(3)
def test_one_graph_generates_what_a_dynamic_cache_does(family: str, rule: str, rows: str, new: int) -> None:
    model, ids = converted(family, **RULES[rule]), random_ids(1 if rows == "one" else 2, 13)
    mask = torch.ones_like(ids)
    if rows == "left-padded":
        mask[0, :5] = 0
    how: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": new, "do_sample": False, "eos_token_id": None,
        "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = model.generate(ids, **how)
    with disable_ttt(model):
        assert distance(torch.stack(model.generate(ids, **how).logits), torch.stack(expected.logits)) > 1e-3
    found = model.generate(ids, cache_implementation="static", compile_config=in_one_graph(), **how)
    assert torch.equal(found.sequences, expected.sequences)
    assert distance(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5
    assert counters["stats"]["unique_graphs"] == (3 if family in SLIDING else 1)


@torch.no_grad()
def decoded(model: PreTrainedModel, forward: Any, ids: Tensor, given: Tensor, mask: Tensor | None) -> Tensor:
    """The logits of `given` tokens [B, n], one by one, after a prompt; in a new static cache."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + given.shape[1])
    seen = {} if mask is None else {"attention_mask": mask}
    model(ids, **{CACHE: cache}, **seen)
    return torch.cat([forward(token, **{CACHE: cache}, **seen).logits for token in given.split(1, dim=1)], 1)


@pytest.mark.parametrize("new", [30, pytest.param(1000, marks=pytest.mark.full)])
def test_later_positions_and_other_caches_need_no_other_graph(new: int) -> None:
    model, ids, given = converted("llama", **RIDGE), random_ids(2, 13), random_ids(2, new, seed=1)
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert (
                distance(decoded(model, graph, ids, given, None), decoded(model, model, ids, given, None))
                < 1e-5
            )
    assert counters["stats"]["unique_graphs"] == 1


def test_single_tokens_that_are_padding_are_not_written() -> None:
    """The mask of a static cache has one width; it tells by its columns which tokens of a row are none."""
    model, ids, given = converted("llama"), random_ids(2, 13), random_ids(2, 20, seed=1)
    mask = torch.ones(2, 33, dtype=torch.long)
    mask[1, [13, 17, 20]] = 0
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (decoded(model, forward, ids, given, mask) for forward in (graph, model))
    assert distance(found, expected) < 1e-5
    assert distance(decoded(model, model, ids, given, None)[1, 8:], expected[1, 8:]) > 1e-3

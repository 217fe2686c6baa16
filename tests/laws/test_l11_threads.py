"""L11: many threads, each with sessions of its own on one model, compute what each alone would, bit for
bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from models import CHUNK, converted, random_ids
from torch import Tensor
from transformers import DynamicCache

from inplace_ttt import disable_ttt, language_head
from inplace_ttt.families import CACHE
from inplace_ttt.ops.precision import in_full_precision
from inplace_ttt.training.loop.held_out import held_out_sums

THREADS, SESSIONS = 6, 3


@pytest.fixture(autouse=True)
def _switching_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    monkeypatch.setattr(language_head, "_AT_ONCE", 2 * 97 * 3)
    yield
    sys.setswitchinterval(before)


def prefill(model: Any, seed: int) -> list[Tensor]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        return [
            model(part, **{CACHE: cache}).logits
            for part in random_ids(2, 3 * CHUNK + 3, seed=seed).split(CHUNK + 3, dim=1)
        ]


def decode(model: Any, seed: int) -> list[Tensor]:
    ids = random_ids(1, CHUNK + 1, seed=seed)
    return [
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=2 * CHUNK,
            do_sample=False,
            eos_token_id=-1,
        )
    ]


def evaluate(model: Any, seed: int) -> list[Tensor]:
    with torch.no_grad():
        return [model(random_ids(2, 4 * CHUNK + 1, seed=seed), use_cache=False).logits]


def train(model: Any, seed: int) -> list[Tensor]:
    ids, asked = random_ids(2, 3 * CHUNK + 2, seed=seed), [p for p in model.parameters() if p.requires_grad]
    loss = model(ids, labels=ids, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, asked)]


def evaluate_off(model: Any, seed: int) -> list[Tensor]:
    with disable_ttt(model):
        return evaluate(model, seed)


def evaluate_by_pieces(model: Any, seed: int) -> list[Tensor]:
    ids = random_ids(2, 4 * CHUNK + 1, seed=seed)
    return [held_out_sums(model, {"input_ids": ids}, ids)]


WORK: dict[str, Callable[[Any, int], list[Tensor]]] = {
    "prefill": prefill,
    "decode": decode,
    "evaluate": evaluate,
    "off": evaluate_off,
    "by pieces": evaluate_by_pieces,
    "train": train,
}


@pytest.mark.parametrize(
    ("name", "target"), [("llama", "embeddings"), ("gpt2", "hidden_states"), ("gemma3", "embeddings")]
)
@pytest.mark.parametrize("work", [*WORK, "all of them at once"])
def test_threads_do_not_see_each_other(work: str, name: str, target: str) -> None:
    model = converted(name, target=target)
    of_thread = [
        WORK[work] if work in WORK else list(WORK.values())[thread % len(WORK)] for thread in range(THREADS)
    ]
    alone = [
        [of_thread[thread](model, 10 * thread + session) for session in range(SESSIONS)]
        for thread in range(THREADS)
    ]
    together = Barrier(THREADS)

    def serve(thread: int) -> list[list[Tensor]]:
        together.wait()
        return [of_thread[thread](model, 10 * thread + session) for session in range(SESSIONS)]

    with ThreadPoolExecutor(THREADS) as pool:
        beside = list(pool.map(serve, range(THREADS)))
    for expected, found in zip(alone, beside, strict=True):
        assert all(
            torch.equal(a, b) for e, f in zip(expected, found, strict=True) for a, b in zip(e, f, strict=True)
        )


def test_float32_is_whole_while_any_thread_needs_it() -> None:
    """One that leaves does not take it from another, and the last one brings back what was set."""
    settings, gpu = torch.backends.cuda.matmul, torch.device("cuda")
    for chosen in ("tf32", settings.fp32_precision):
        settings.fp32_precision = chosen
        first, second = in_full_precision(gpu), in_full_precision(gpu)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        within = settings.fp32_precision
        second.__exit__(None, None, None)
        assert (within, settings.fp32_precision) == ("ieee", chosen)

"""Which forward a thread is in: models within models, and forwards that were interrupted."""

import contextlib
import gc
import weakref

import pytest
import torch
from models import CHUNK, converted, logits, random_ids
from torch import Tensor

from inplace_ttt.families import locate
from inplace_ttt.layer.per_thread import this_thread

IDS = random_ids(2, 4 * CHUNK + 3)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class _Bystander:
    def see(self, *_: object) -> None:
        """A hook that is a method, as ours are."""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_forwards_that_were_interrupted_are_forgotten(name: str) -> None:
    """torch tells no hook of a KeyboardInterrupt; the next forward in the thread, of any model, finds what it
    left."""
    model, other = converted(name), converted("llama", chunk_size=5)
    expected, left = logits(model, IDS), []
    for bystander in (model, other):
        bystander.register_forward_pre_hook(_Bystander().see)
    for part in ("attention", "mlp", "mlp"):
        handle = getattr(locate(model).layers[2], part).register_forward_pre_hook(_interrupt)
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                logits(model, IDS)
            left.append(weakref.ref(this_thread().open))
        handle.remove()
        logits(other if part == "attention" else model, IDS)
        assert this_thread().open is None and this_thread().armed is None
    gc.collect()
    assert not any(context() for context in left)
    assert torch.equal(logits(model, IDS), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("same", [False, True], ids=["another", "the same"])
def test_a_model_within_a_model(name: str, interrupted: bool, same: bool) -> None:
    """Each knows its own forward, and an interrupt before both is forgotten."""
    model = converted(name)
    inner, ids = model if same else converted(name, chunk_size=5), random_ids(1, 3 * CHUNK)
    expected, expected_within = logits(model, IDS), logits(inner, ids)
    attention = locate(model).layers[2].attention
    if interrupted:
        handle = attention.register_forward_pre_hook(_interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            logits(model, IDS)
        handle.remove()
    within: list[Tensor] = []
    depths: list[int] = []

    def read(*_: object) -> None:
        mine = context = this_thread().open
        depth = 0
        while context is not None:
            context, depth = context.outer, depth + 1
        depths.append(depth)
        if depth == 1:
            within.append(logits(inner, ids))
        assert this_thread().open is mine

    for module in {attention, locate(inner).layers[2].attention}:
        module.register_forward_pre_hook(read, prepend=True)
    assert torch.equal(logits(model, IDS), expected)
    assert depths == [1, 2] and torch.equal(within[0], expected_within) and this_thread().open is None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_outlives_an_interrupt_of_one_within_it(name: str) -> None:
    model, inner = converted(name), converted(name, chunk_size=5)
    expected = logits(model, IDS)
    locate(inner).layers[2].mlp.register_forward_pre_hook(_interrupt)

    def read(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            logits(inner, IDS)

    handle = locate(model).layers[2].attention.register_forward_pre_hook(read, prepend=True)
    for _ in range(2):
        assert torch.equal(logits(model, IDS), expected)
    handle.remove()
    assert torch.equal(logits(model, IDS), expected) and this_thread().open is None

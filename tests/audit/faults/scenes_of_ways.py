"""Scenes of the ways that users call a model in, and of large sizes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from models import CHUNK, gradients, logits, random_ids
from torch import Tensor
from transformers import DynamicCache

from inplace_ttt import Session
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import disable_ttt, fast_weights

from .world import Spoil, World

Numbers = dict[str, Tensor]
TEXT = 4 * CHUNK + 3


def one_call(
    world: World, spoil: Spoil | None, rows: int = 1, tokens: int = TEXT, chunk: int = CHUNK, **given: Any
) -> Numbers:
    return {"logits": logits(world.model(chunk, spoil), random_ids(rows, tokens), **given)}


def documents(world: World, spoil: Spoil | None) -> Numbers:
    positions = torch.cat([torch.arange(2 * CHUNK + 1) for _ in range(12)])[None]
    return one_call(world, spoil, tokens=positions.shape[1], position_ids=positions)


def elsewhere(world: World, spoil: Spoil | None) -> Numbers:
    """Documents of which none begins at position 0."""
    positions = torch.cat([start + torch.arange(2 * CHUNK + 1) for start in (5, 9)])[None]
    return one_call(world, spoil, tokens=positions.shape[1], position_ids=positions)


def lengths(world: World, spoil: Spoil | None) -> Numbers:
    size = 2 * CHUNK + 1
    ends = torch.tensor([0, size, 2 * size]).int()
    flat = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": size, "max_length_k": size}
    return one_call(world, spoil, tokens=2 * size, position_ids=torch.arange(size).repeat(2)[None], **flat)


def embedded(world: World, spoil: Spoil | None) -> Numbers:
    model = world.model(spoil=spoil)
    with torch.no_grad():
        return {
            "logits": model(
                inputs_embeds=model.get_input_embeddings()(random_ids(1, TEXT)), use_cache=False
            ).logits
        }


def within(context: Callable[[], Any]) -> Callable[[World, Spoil | None], Numbers]:
    def scene(world: World, spoil: Spoil | None) -> Numbers:
        model, cache = world.model(spoil=spoil), DynamicCache()
        with torch.no_grad(), context():
            parts = [
                model(ids, **{CACHE: cache}, use_cache=True).logits
                for ids in random_ids(1, TEXT).split([9, 9, 7, 6], 1)
            ]
            return {"logits": torch.cat(parts, 1).detach().float().clone()}

    return scene


def with_gradients(world: World, spoil: Spoil | None) -> Numbers:
    return {"logits": world.model(spoil=spoil)(random_ids(1, TEXT), use_cache=False).logits.detach()}


def recomputed(world: World, spoil: Spoil | None) -> Numbers:
    """Gradients with gradient checkpointing."""
    model = world.model(spoil=spoil).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = random_ids(1, TEXT)
    return gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)


@torch.no_grad()
def kv_cache_dropped(world: World, spoil: Spoil | None) -> Numbers:
    model = world.model(spoil=spoil)
    state = Session(model)
    state.read(random_ids(1, TEXT))
    return {
        "logits": logits(
            model, random_ids(1, 20, seed=2), **{CACHE: state.drop_kv_cache().cache}, use_cache=True
        )
    }


@torch.no_grad()
def copied_cache(world: World, spoil: Spoil | None) -> Numbers:
    """A copy of a cache reads on, and then the cache itself."""
    model, cache = world.model(spoil=spoil), DynamicCache()
    logits(model, random_ids(1, TEXT), **{CACHE: cache}, use_cache=True)
    found = [
        logits(model, random_ids(1, 20, seed=n), **{CACHE: held}, use_cache=True)
        for n, held in enumerate((copy.deepcopy(cache), cache))
    ]
    return {"logits": torch.cat(found)}


@torch.no_grad()
def off_for_a_while(world: World, spoil: Spoil | None) -> Numbers:
    model, cache = world.model(spoil=spoil), DynamicCache()
    found = [logits(model, random_ids(1, TEXT), **{CACHE: cache}, use_cache=True)]
    with disable_ttt(model):
        found.append(logits(model, random_ids(1, 12, seed=2), **{CACHE: cache}, use_cache=True))
    found.append(logits(model, random_ids(1, 20, seed=3), **{CACHE: cache}, use_cache=True))
    return {"logits": torch.cat(found, 1)}


@torch.no_grad()
def after_generation(world: World, spoil: Spoil | None) -> Numbers:
    """A session that generates over a chunk's edge, and then reads on."""
    model = world.model(spoil=spoil)
    model.generation_config.eos_token_id = None
    state = Session(model)
    state.generate(random_ids(1, 3 * CHUNK - 2), max_new_tokens=5, do_sample=False)
    return {"logits": logits(model, random_ids(1, 20, seed=3), **{CACHE: state.cache}, use_cache=True)}


@torch.no_grad()
def single_tokens_of_text(world: World, spoil: Spoil | None) -> Numbers:
    """A session reads single tokens, with updates off."""
    model = world.model(spoil=spoil, update_on_decode=False)
    state = Session(model)
    for number, size in enumerate((CHUNK + 3, 1, 1, 1, 1, 9)):
        state.read(random_ids(1, size, seed=number))
    return {"logits": logits(model, random_ids(1, 20, seed=9), **{CACHE: state.cache}, use_cache=True)}


@torch.no_grad()
def copied_model(world: World, spoil: Spoil | None) -> Numbers:
    """A copy of the model whose P is turned round, and the model itself after that."""
    model = world.model(spoil=spoil)
    other = copy.deepcopy(model)
    for layer in fast_weights(other).values():
        layer.ttt.proj.neg_()
    return {"logits": torch.cat([logits(one, random_ids(1, TEXT)) for one in (other, model)])}


@torch.no_grad()
def long_session(world: World, spoil: Spoil | None) -> Numbers:
    """A session beyond what it reads at once."""
    model = world.model(spoil=spoil)
    state = Session(model)
    state.read(random_ids(1, 1100))
    return {"logits": logits(model, random_ids(1, 20, seed=9), **{CACHE: state.cache}, use_cache=True)}


@torch.no_grad()
def strength(world: World, spoil: Spoil | None) -> Numbers:
    """How much the first TTT layer reads, along what a sound one reads of the same: beside it rounding is
    small."""
    model, seen = world.model(spoil=spoil), []
    first = next(iter(fast_weights(model).values()))
    handle = first.register_forward_hook(lambda module, args, out: seen.append(out.double()))
    ids = random_ids(1, 12 * CHUNK)
    logits(model, ids)
    with disable_ttt(model):
        logits(model, ids)
    handle.remove()
    return {"state": (seen[0] - seen[1]).norm()[None]}


@torch.no_grad()
def tiny_writes(world: World, spoil: Spoil | None) -> Numbers:
    """What a stream reads of writes so small that η has to make them large again."""
    model = world.model(spoil=spoil, eta=1e5)
    for layer in fast_weights(model).values():
        layer.ttt.proj.mul_(1e-4)
    cache = DynamicCache()
    return {
        "logits": torch.cat(
            [
                logits(model, i, **{CACHE: cache}, use_cache=True)
                for i in random_ids(1, TEXT).split([20, 3, 8], 1)
            ],
            1,
        )
    }


WAYS: dict[str, Callable[[World, Spoil | None], Numbers]] = {
    "many rows": functools.partial(one_call, rows=8),
    "fifty chunks": functools.partial(one_call, tokens=50 * CHUNK),
    "chunks of 120": functools.partial(one_call, tokens=400, chunk=120),
    "twelve documents": documents,
    "positions from elsewhere": elsewhere,
    "cu_seq_lens": lengths,
    "inputs_embeds": embedded,
    "inference mode": within(torch.inference_mode),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "gradients in evaluation": with_gradients,
    "recomputed": recomputed,
    "KV cache dropped": kv_cache_dropped,
    "copied cache": copied_cache,
    "off for a while": off_for_a_while,
    "after generation": after_generation,
    "single tokens of text": single_tokens_of_text,
    "copied model": copied_model,
    "long session": long_session,
    "strength": strength,
    "tiny writes": tiny_writes,
}

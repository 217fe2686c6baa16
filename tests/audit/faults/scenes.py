"""What a converted model computes in small scenes: the proof, apart from the audit, that a fault changes
something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import CHUNK, gradients, logits, random_ids, streamed
from torch import Tensor
from transformers import DynamicCache

from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams
from inplace_ttt.surgery import fast_weights

from .scene_pieces import PIECES, Numbers, read_on
from .scenes_of_files import adapter, checkpoint, converted_folder, fork, reference_format, session
from .scenes_of_ways import WAYS
from .world import Spoil, World

Scene = Callable[[World, Spoil | None], Numbers]

LONG = 12 * CHUNK + 3
LENGTHS = (41, 24, 31)
DOCUMENTS = ((5, 16, 18, 17, 9), (20, 3, 17, 14, 11))


def whole(world: World, spoil: Spoil | None) -> Numbers:
    """One row of five chunks and a piece."""
    return {"logits": logits(world.model(spoil=spoil), random_ids(1, 5 * CHUNK + 4))}


def chunks_of_16(world: World, spoil: Spoil | None) -> Numbers:
    return {"logits": logits(world.model(16, spoil), random_ids(1, 85))}


def long(world: World, spoil: Spoil | None) -> Numbers:
    return {"logits": logits(world.model(spoil=spoil), random_ids(1, LONG))}


def training(world: World, spoil: Spoil | None, tokens: int = 5 * CHUNK + 4, chunk: int = CHUNK) -> Numbers:
    """Logits and every gradient of a row in training."""
    model = world.model(chunk, spoil).train()
    ids = random_ids(1, tokens)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    return {"logits": out.logits.detach(), **gradients(model, out.loss)}


def training_batch(world: World, spoil: Spoil | None) -> Numbers:
    model = world.model(spoil=spoil).train()
    ids, mask = padded(left=True)
    out = model(input_ids=ids, attention_mask=mask, labels=ids.where(mask > 0, -100), use_cache=False)
    return {"logits": real(out.logits.detach(), mask), **gradients(model, out.loss)}


def batch(world: World, spoil: Spoil | None) -> Numbers:
    """Rows of three lengths, padded at the left, at the right, and two as long as each other."""
    model = world.model(spoil=spoil)
    found = {"even": logits(model, random_ids(2, 5 * CHUNK + 4))}
    for left in (True, False):
        ids, mask = padded(left)
        found[f"padded {left=}"] = real(logits(model, ids, attention_mask=mask), mask)
    return found


def packed(world: World, spoil: Spoil | None) -> Numbers:
    """Two rows of packed documents, and the first of them alone."""
    model = world.model(spoil=spoil)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    ids = random_ids(*positions.shape)
    alone = logits(model, ids[:1], position_ids=positions[:1])
    return {"two rows": logits(model, ids, position_ids=positions), "one row": alone}


def packed_training(world: World, spoil: Spoil | None) -> Numbers:
    model = world.model(spoil=spoil).train()
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS[0]])[None]
    ids = random_ids(*positions.shape)
    out = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
    return {"logits": out.logits.detach(), **gradients(model, out.loss)}


def stream(world: World, spoil: Spoil | None) -> Numbers:
    return {"logits": streamed(world.model(spoil=spoil), random_ids(1, sum(PIECES)), PIECES)}


def decode(world: World, spoil: Spoil | None) -> Numbers:
    return {"logits": streamed(world.model(spoil=spoil), random_ids(1, 35), [10, *[1] * 25])}


def long_stream(world: World, spoil: Spoil | None) -> Numbers:
    return {
        "logits": streamed(
            world.model(spoil=spoil), random_ids(1, LONG), [20, 1, 9, 40, *[1] * 10, LONG - 80]
        )
    }


def half_precision(world: World, spoil: Spoil | None) -> Numbers:
    """What the first TTT layer's stream holds after a long text: what comes before that layer is right to the
    last bit."""
    model = world.model(spoil=spoil)
    cache = DynamicCache(config=model.config)
    read_on(model, cache, random_ids(1, LONG), (20, 1, 9, LONG - 30))
    state = streams(cache)[0].state
    assert state is not None
    return {"state": state}


def padded_stream(world: World, spoil: Spoil | None) -> Numbers:
    """A prompt of rows padded at the left, then tokens one by one."""
    model = world.model(spoil=spoil)
    ids, mask = padded(left=True)
    cache = DynamicCache(config=model.config)
    found = [real(logits(model, ids, attention_mask=mask, **{CACHE: cache}, use_cache=True), mask)]
    for step in range(9):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        token = random_ids(len(ids), 1, seed=step)
        found.append(logits(model, token, attention_mask=mask, **{CACHE: cache}, use_cache=True).flatten())
    return {"logits": torch.cat(found)}


def reset(world: World, spoil: Spoil | None) -> Numbers:
    """A stream that was reset, twice."""
    model = world.model(spoil=spoil)
    cache, found = DynamicCache(config=model.config), []
    for seed in range(3):
        found.append(read_on(model, cache, random_ids(1, 40, seed=seed), (20, 1, 1, 18)))
        cache.reset()
    return {"logits": torch.cat(found, 1)}


def taken_back(world: World, spoil: Spoil | None) -> Numbers:
    """Tokens are taken back inside the open chunk, and over a chunk's end; then others are read."""
    model, found = world.model(spoil=spoil), []
    for known, guessed, removed in ((16, 4, 2), (10, 6, 5), (17, 5, 5)):
        cache = DynamicCache(config=model.config)
        read_on(model, cache, random_ids(1, known + guessed), (known, guessed))
        cache.crop(-removed)
        found.append(read_on(model, cache, random_ids(1, 24, seed=2), (3, 1, 20)))
    return {"logits": torch.cat(found, 1)}


def chosen_rows(world: World, spoil: Spoil | None) -> Numbers:
    """Rows of a cache are reordered, repeated and selected in the middle of a chunk, with text read after
    each."""
    model = world.model(spoil=spoil)
    cache = DynamicCache(config=model.config)
    found = [read_on(model, cache, random_ids(2, 18), (18,)).flatten()]
    changes: tuple[Callable[[], Any], ...] = (
        lambda: cache.reorder_cache(torch.tensor([1, 1])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([3, 0, 2, 1])),
        lambda: cache.batch_select_indices(torch.tensor([2, 0])),
    )
    for step, change in enumerate(changes):
        change()
        rows = 4 if step in (1, 2) else 2
        found.append(read_on(model, cache, random_ids(rows, 10, seed=step), (4, 1, 1, 1, 3)).flatten())
    return {"logits": torch.cat(found)}


def beams(world: World, spoil: Spoil | None) -> Numbers:
    """What beam search finds, and how likely it is."""
    model = world.model(spoil=spoil)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    ids = random_ids(2, 12)
    options: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **options
    )
    return {"sequences": out.sequences.double(), "scores": out.sequences_scores}


def start(world: World, spoil: Spoil | None) -> Numbers:
    """Of a fresh conversion: how conv and P are distributed, and what the model computes."""
    model = world.model(spoil=spoil, writes=False)
    wanted = model.config.get_text_config().initializer_range
    layers = [layer.ttt for layer in fast_weights(model).values()]
    w0 = torch.cat(
        [layer.get_parameter("weight").detach().flatten() for layer in fast_weights(model).values()]
    )
    diagonals = torch.stack([ttt.proj.detach().diagonal() for ttt in layers]).double() / wanted
    off = (
        torch.stack([(ttt.proj.detach() - ttt.proj.detach().diagonal().diag()).abs().max() for ttt in layers])
        / wanted
    )
    alike = torch.corrcoef(diagonals).fill_diagonal_(0).abs().max()
    shape = torch.stack(
        [diagonals.std(), diagonals.mean() / 10, diagonals.abs().mean(), diagonals.abs().max()]
    )
    statistics = {
        "conv": torch.stack([ttt.conv.detach().abs().max() for ttt in layers]),
        "off": off,
        "alike": (alike > 0.99).double(),
    }
    computed = {
        "logits": logits(model, random_ids(1, 5 * CHUNK + 4)),
        "stream": streamed(model, random_ids(1, sum(PIECES)), PIECES),
    }
    return {**computed, **statistics, "W0": w0, "shape": (shape * 5).round()}


def trained(world: World, spoil: Spoil | None) -> Numbers:
    """Read, then moved as by an optimizer's step, then read again."""
    model = world.model(spoil=spoil)
    ids = random_ids(1, 5 * CHUNK + 4)
    first = logits(model, ids)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator).to(parameter)
            )
    return {
        "logits": torch.cat([first, logits(model, ids)], 1),
        "stream": streamed(model, random_ids(1, sum(PIECES)), PIECES),
    }


def padded(left: bool) -> tuple[Tensor, Tensor]:
    """Rows of `LENGTHS` and their mask."""
    width = max(LENGTHS)
    pads = [(width - n, 0) if left else (0, width - n) for n in LENGTHS]
    rows = [
        torch.nn.functional.pad(random_ids(1, n, seed=n), pad) for n, pad in zip(LENGTHS, pads, strict=True)
    ]
    mask = [
        torch.nn.functional.pad(torch.ones(1, n, dtype=torch.long), pad)
        for n, pad in zip(LENGTHS, pads, strict=True)
    ]
    return torch.cat(rows), torch.cat(mask)


def real(values: Tensor, mask: Tensor) -> Tensor:
    """Values [B, T, V] of the tokens that are no padding, flat."""
    return values[mask > 0].flatten()


SCENES: dict[str, Scene] = {
    "whole": whole,
    "chunks of 16": chunks_of_16,
    "long": long,
    "training": training,
    "long training": lambda world, spoil: training(world, spoil, LONG),
    "training, chunks of 16": lambda world, spoil: training(world, spoil, 85, 16),
    "training batch": training_batch,
    "batch": batch,
    "packed": packed,
    "packed training": packed_training,
    "stream": stream,
    "decode": decode,
    "long stream": long_stream,
    "half precision": half_precision,
    "padded stream": padded_stream,
    "reset": reset,
    "taken back": taken_back,
    "chosen rows": chosen_rows,
    "beams": beams,
    "session": session,
    "fork": fork,
    "checkpoint": checkpoint,
    "adapter": adapter,
    "converted folder": converted_folder,
    "reference format": reference_format,
    "start": start,
    "trained": trained,
    **WAYS,
}

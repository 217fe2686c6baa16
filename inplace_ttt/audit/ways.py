"""Further ways in which users call a model. Each must compute the declared rule.

The texts are short, and `sizes` draws longer texts. A way that a model family or a setting refuses is
skipped.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import InPlaceTTTError
from ..families import CACHE, locate
from ..layer.overrides import overriding, with_config
from ..session.session import Session
from ..surgery import disable_ttt, fast_weights
from .probed import Documents, Probed, Reading
from .readings import packed
from .recording import Piece, Recording, recording


def ways_of_calling(probed: Probed) -> Iterator[Reading]:
    """Runs every way that this model accepts."""
    for way in WAYS:
        try:
            yield from way(probed)
        except InPlaceTTTError:
            continue


def as_one_text(
    record: Recording, rows: int, skipped: Sequence[int] = (), unwritten: Sequence[int] = ()
) -> Documents:
    """Returns each row of all forwards as one document.

    Args:
        record: the recording.
        rows: number of rows.
        skipped: numbers of forwards that are left out.
        unwritten: numbers of forwards whose tokens read but do not write.
    """
    numbers = [n for n in range(len(record.forwards)) if n not in skipped]
    return [[Piece(n, row, 0, record.tokens(n), n not in unwritten) for n in numbers] for row in range(rows)]


def other_arguments(probed: Probed) -> Iterator[Reading]:
    """Reads the same tokens in one call with other arguments."""
    ids, embed = probed.ids(2, 2 * probed.chunk + 5), probed.lm.get_input_embeddings()
    ways: dict[str, dict[str, Any]] = {
        "a mask of ones": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "labels": {"input_ids": ids, "labels": ids},
        "gradients in evaluation": {"input_ids": ids},
    }
    if "inputs_embeds" in inspect.signature(probed.lm.forward).parameters:
        ways["inputs_embeds"] = {"inputs_embeds": embed(ids)}
    if probed.takes_documents:
        ways["positions from 7 on"] = {
            "input_ids": ids,
            "position_ids": torch.arange(7, 7 + ids.shape[1], device=ids.device).expand(2, -1),
        }
    for name, given in ways.items():
        with (
            recording(probed.lm, probed.config) as record,
            torch.set_grad_enabled(name == "gradients in evaluation"),
        ):
            probed.lm(**given, use_cache=False)
        yield name, record, record.whole()
    with recording(probed.lm, probed.config) as record:
        locate(probed.lm).base(ids, use_cache=False)
    yield "the base model alone", record, record.whole()


def documents_by_lengths(probed: Probed) -> Iterator[Reading]:
    """Reads documents marked by cu_seq_lens, and by positions that do not begin at 0."""
    chunk, lengths = probed.chunk, [2 * probed.chunk + 3, probed.chunk - 3, 2 * probed.chunk + 1]
    if not probed.takes_documents:
        return
    yield "documents whose positions start elsewhere", *packed(probed, [lengths], first_positions=(4, 9, 2))
    ends = torch.tensor([0, *lengths], device=probed.ids(1, 1).device).cumsum(0).int()
    flat: dict[str, Any] = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": 2 * chunk + 3,
        "max_length_k": 2 * chunk + 3,
    }
    if any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(locate(probed.lm).base.forward).parameters.values()
    ):
        yield "cu_seq_lens", *packed(probed, [lengths], **flat)


def contexts(probed: Probed) -> Iterator[Reading]:
    """Reads inside torch.inference_mode and after it, and under autocast."""
    chunk, device = probed.chunk, probed.ids(1, 1).device
    around: list[AbstractContextManager[Any]] = [
        torch.inference_mode(),
        torch.inference_mode(),
        nullcontext(),
        nullcontext(),
    ]
    yield "torch.inference_mode, and after it", *_stream(probed, [chunk + 3, 2 * chunk + 1, chunk, 5], around)
    if probed.lm.dtype == torch.float32:
        with torch.autocast(device.type, torch.bfloat16):
            record = probed.read(probed.ids(1, 3 * chunk + 2))
        yield "autocast", dataclasses.replace(record, dtype=torch.bfloat16), record.whole()
        cast = [torch.autocast(device.type, torch.bfloat16) for _ in range(3)]
        record, texts = _stream(probed, [chunk + 3, 2 * chunk + 1, 4], cast)
        yield "autocast, in pieces", dataclasses.replace(record, dtype=torch.bfloat16), texts


def caches(probed: Probed) -> Iterator[Reading]:
    """Reads through several caches.

    They are a cache that the model creates, a copied cache, a cache without its KV cache, and a cache used
    with TTT off.
    """
    chunk, lm = probed.chunk, probed.lm
    first, second, third = probed.ids(2, 4 * chunk).split([chunk + 3, chunk + 4, 2 * chunk - 7], 1)
    with recording(lm, probed.config) as record:
        cache = lm(first, use_cache=True)[CACHE]
        other = copy.deepcopy(cache)
        for held, ids in ((cache, second), (other, third), (cache, third)):
            lm(ids, **{CACHE: held}, use_cache=True)
    yield "a cache of the model's own", record, as_one_text(record, 2, skipped=[2])
    yield "a copied cache", record, as_one_text(record, 2, skipped=[1, 3])
    state = Session(lm)
    with recording(lm, probed.config) as record:
        state.read(first)
        state.read(second)
        fresh = state.drop_kv_cache()
        fresh.read(third)
        state.read(third)
    yield "the KV cache dropped", record, as_one_text(record, 2, skipped=[3])
    yield "the session before that", record, as_one_text(record, 2, skipped=[2])
    cache = probed.cache()
    with recording(lm, probed.config) as record:
        lm(first, **{CACHE: cache}, use_cache=True)
        with disable_ttt(lm):
            lm(second, **{CACHE: cache}, use_cache=True)
        lm(third, **{CACHE: cache}, use_cache=True)
    off = [[Piece(1, row, 0, second.shape[1], False)] for row in range(2)]
    yield "TTT off for a while", record, [*as_one_text(record, 2, skipped=[1]), *off]


def moved_rows(probed: Probed) -> Iterator[Reading]:
    """Copies, reorders, repeats and chooses rows of a cache, and reads text after each step."""
    chunk, seed = probed.chunk, 0
    steps: list[tuple[list[int], Callable[[Any, list[int]], Any]]] = [
        ([1, 1, 0], _reorder),
        ([2, 0, 1], _reorder),
        ([0, 0, 1, 1, 2, 2], lambda cache, order: cache.batch_repeat_interleave(2)),
        ([5, 0, 3, 3, 1, 4], _reorder),
        (
            [4, 1],
            lambda cache, order: cache.batch_select_indices(
                torch.tensor(order, device=probed.ids(1, 1).device)
            ),
        ),
    ]
    cache, rows = probed.cache(), 3
    texts: list[list[Piece]] = [[] for _ in range(rows)]
    with recording(probed.lm, probed.config) as record:
        for number, size in enumerate((chunk + 4, chunk - 2, chunk + 1, chunk // 2, chunk, chunk + 2)):
            if number:
                order, move = steps[number - 1]
                move(cache, order)
                texts = [list(texts[row]) for row in order]
            seed += 1
            probed.lm(probed.ids(len(texts), size, seed), **{CACHE: cache}, use_cache=True)
            for row, text in enumerate(texts):
                text.append(Piece(number, row, 0, size))
    yield "rows copied and reordered five times", record, texts


def _reorder(cache: Any, order: list[int]) -> None:
    cache.reorder_cache(torch.tensor(order))


def generation(probed: Probed) -> Iterator[Reading]:
    """Reads text after `generate`, by the model's own method and by a session's."""
    chunk, lm = probed.chunk, probed.lm
    plain = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    first, second = probed.ids(2, 4 * chunk).split([2 * chunk - 2, 2 * chunk + 2], 1)
    cache = probed.cache()
    with recording(lm, probed.config) as record, overriding([lm], generation_config=plain):
        lm.generate(first, attention_mask=torch.ones_like(first), **{CACHE: cache})
        generated = len(record.forwards)
        lm(second, **{CACHE: cache}, use_cache=True)
    unwritten = [] if probed.config.update_on_decode else range(1, generated)
    yield "read on after generate", record, as_one_text(record, 2, unwritten=unwritten)
    state = Session(lm)
    with recording(lm, probed.config) as record, overriding([lm], generation_config=plain):
        state.generate(first)
        generated = len(record.forwards)
        state.read(second)
    unwritten = [] if probed.config.update_on_decode else range(2, generated)
    yield "a session read on after it generated", record, as_one_text(record, 2, unwritten=unwritten)


def updates_off(probed: Probed) -> Iterator[Reading]:
    """Reads without writes of generated tokens.

    A single token is then not written, unless a session reads it as text.
    """
    lm, chunk = probed.lm, probed.chunk
    off = dataclasses.replace(probed.config, update_on_decode=False)
    with with_config(probed.layers.values(), update_on_decode=False):
        state, cache = Session(lm), probed.cache()
        with recording(lm, off) as record:
            for size in (chunk + 4, 1, 1, chunk - 6, 1, chunk + 2):
                state.read(probed.ids(2, size, size))
        yield "a session's single tokens with updates off", record, as_one_text(record, 2)
        with recording(lm, off) as record:
            for size in (chunk + 4, 1, 1, chunk - 5, 1, chunk + 2):
                lm(probed.ids(2, size, size), **{CACHE: cache}, use_cache=True)
        yield "single tokens with updates off", record, as_one_text(record, 2, unwritten=[1, 2, 4])


def copied_model(probed: Probed) -> Iterator[Reading]:
    """Reads with a deep copy of the model that has another P, and with the original."""
    rules = {index: probed.rule(index) for index in probed.layers}
    other = copy.deepcopy(probed.lm)
    for layer in fast_weights(other).values():
        layer.ttt.proj.data = -0.5 * layer.ttt.proj.data
    twin = Probed(other, probed.config, probed.seed)
    record = twin.read(twin.ids(1, 3 * twin.chunk + 2))
    yield "a copy of the model", record, record.whole()
    record = probed.read(probed.ids(1, 3 * probed.chunk + 2))
    yield "a model that was copied", dataclasses.replace(record, rules=rules), record.whole()


def _stream(
    probed: Probed, sizes: Sequence[int], around: Sequence[AbstractContextManager[Any]]
) -> tuple[Recording, Documents]:
    """Reads two rows through one cache in pieces, each piece inside its own context."""
    cache, ids = probed.cache(), probed.ids(2, sum(sizes))
    with recording(probed.lm, probed.config) as record:
        for piece, context in zip(ids.split(list(sizes), 1), around, strict=True):
            with context:
                probed.lm(piece, **{CACHE: cache}, use_cache=True)
    return record, as_one_text(record, 2)


WAYS = (
    other_arguments,
    documents_by_lengths,
    contexts,
    caches,
    moved_rows,
    generation,
    updates_off,
    copied_model,
)

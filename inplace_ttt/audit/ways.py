"""Further ways in which users call a model. Each must compute the declared rule.

The texts are short, and `scenes.drawn_sizes` draws longer texts. A way that a model family or a setting
refuses is skipped.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import InPlaceTTTError
from ..families import CACHE, locate
from ..layer.overrides import overriding
from ..session.session import Session
from ..surgery import disable_ttt, fast_weights
from .prepared import Prepared, Reading
from .probed import Probed
from .readings import Rows, Step, packed, streamed, whole
from .recording import Piece


def ways_of_calling(probed: Prepared) -> Iterator[Reading]:
    """Runs every way that this model accepts."""
    for way in WAYS if probed.by_layers else OF_LOGITS:
        try:
            yield from way(probed)
        except InPlaceTTTError:
            continue


def other_arguments(probed: Prepared) -> Iterator[Reading]:
    """Reads the same tokens in one call with other arguments."""
    tokens = 2 * probed.chunk + 5
    ids = probed.ids(2, tokens)
    yield whole(probed, "a mask of ones", 2, tokens, attention_mask=torch.ones_like(ids))
    with probed.recording() as record:
        probed.lm(input_ids=ids, labels=ids, use_cache=False)
    yield "labels", record, record.whole()
    with torch.enable_grad():
        yield whole(probed, "gradients in evaluation", 2, tokens)


def other_inputs(probed: Prepared) -> Iterator[Reading]:
    """Reads embeddings, positions that begin elsewhere, and with the base model alone."""
    tokens = 2 * probed.chunk + 5
    ids = probed.ids(2, tokens)
    if "inputs_embeds" in inspect.signature(probed.lm.forward).parameters:
        with probed.recording() as record:
            probed.lm(inputs_embeds=probed.lm.get_input_embeddings()(ids), use_cache=False)
        yield "inputs_embeds", record, record.whole()
    if probed.takes_positions:
        positions = torch.arange(7, 7 + tokens, device=ids.device).expand(2, -1)
        yield whole(probed, "positions from 7 on", 2, tokens, position_ids=positions)
    with probed.recording() as record:
        locate(probed.lm).base(ids, use_cache=False)
    yield "the base model alone", record, record.whole()


def documents_by_lengths(probed: Prepared) -> Iterator[Reading]:
    """Reads documents marked by cu_seq_lens, and by positions that do not begin at 0."""
    lengths = [2 * probed.chunk + 3, probed.chunk - 3, 2 * probed.chunk + 1]
    if not probed.takes_documents:
        return
    yield "documents whose positions start elsewhere", *packed(probed, [lengths], first_positions=(4, 9, 2))
    ends = torch.tensor([0, *lengths], device=probed.ids(1, 1).device).cumsum(0).int()
    flat: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    flat |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    parameters = inspect.signature(locate(probed.lm).base.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        yield "cu_seq_lens", *packed(probed, [lengths], **flat)


def contexts(probed: Prepared) -> Iterator[Reading]:
    """Reads inside torch.inference_mode and after it, and under autocast."""
    chunk, device = probed.chunk, probed.ids(1, 1).device
    steps = [chunk + 3, 2 * chunk + 1, chunk, 5]
    record, texts = streamed(
        probed, 2, steps, around=lambda number: torch.inference_mode() if number < 2 else nullcontext()
    )
    yield "torch.inference_mode, and after it", record, texts
    if probed.lm.dtype == torch.float32:
        with torch.autocast(device.type, torch.bfloat16):
            _, record, text = whole(probed, "", 1, 3 * chunk + 2)
        yield "autocast", dataclasses.replace(record, dtype=torch.bfloat16), text
        record, texts = streamed(
            probed, 2, [*steps[:2], 4], around=lambda number: torch.autocast(device.type, torch.bfloat16)
        )
        yield "autocast, in pieces", dataclasses.replace(record, dtype=torch.bfloat16), texts


def caches(probed: Prepared) -> Iterator[Reading]:
    """Reads through a cache that the model creates, and through a copy of it."""
    chunk, lm = probed.chunk, probed.lm
    first, second, third = probed.ids(2, 4 * chunk).split([chunk + 3, chunk + 4, 2 * chunk - 7], 1)
    with probed.recording() as record:
        cache = lm(first, use_cache=True)[CACHE]
        other = copy.deepcopy(cache)
        for held, ids in ((cache, second), (other, third), (cache, third)):
            lm(ids, **{CACHE: held}, use_cache=True)
    yield "a cache of the model's own", record, record.as_one_text(2, skipped=[2])
    yield "a copied cache", record, record.as_one_text(2, skipped=[1, 3])


def emptied_caches(probed: Prepared) -> Iterator[Reading]:
    """Reads through a cache without its KV cache, and through a cache that was used with TTT off."""
    chunk, lm = probed.chunk, probed.lm
    first, second, third = probed.ids(2, 4 * chunk).split([chunk + 3, chunk + 4, 2 * chunk - 7], 1)
    state = Session(lm)
    with probed.recording() as record:
        state.read(first)
        state.read(second)
        fresh = state.drop_kv_cache()
        fresh.read(third)
        state.read(third)
    yield "the KV cache dropped", record, record.as_one_text(2, skipped=[3])
    yield "the session before that", record, record.as_one_text(2, skipped=[2])
    cache = probed.cache()
    with probed.recording() as record:
        lm(first, **{CACHE: cache}, use_cache=True)
        with disable_ttt(lm):
            lm(second, **{CACHE: cache}, use_cache=True)
        lm(third, **{CACHE: cache}, use_cache=True)
    off = [[Piece(1, row, 0, second.shape[1], False)] for row in range(2)]
    yield "TTT off for a while", record, [*record.as_one_text(2, skipped=[1]), *off]


def moved_rows(probed: Prepared) -> Iterator[Reading]:
    """Copies, reorders, repeats and chooses rows of a cache, and reads text after each step."""
    c = probed.chunk
    repeated = Rows((0, 0, 1, 1, 2, 2), "batch_repeat_interleave")
    chosen = Rows((4, 1), "batch_select_indices")
    steps: list[Step] = [c + 4, Rows((1, 1, 0)), c - 2, Rows((2, 0, 1)), c + 1, repeated, c // 2]
    steps += [Rows((5, 0, 3, 3, 1, 4)), c, chosen, c + 2]
    yield "rows copied and reordered five times", *streamed(probed, 3, steps)


def generation(probed: Prepared) -> Iterator[Reading]:
    """Reads text after `generate`, by the model's own method and by a session's."""
    chunk, lm, writes = probed.chunk, probed.lm, probed.config.update_on_decode
    plain = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    first, second = probed.ids(2, 4 * chunk).split([2 * chunk - 2, 2 * chunk + 2], 1)
    cache = probed.cache()
    with probed.recording() as record, overriding([lm], generation_config=plain):
        lm.generate(first, attention_mask=torch.ones_like(first), **{CACHE: cache})
        generated = len(record.shapes)
        lm(second, **{CACHE: cache}, use_cache=True)
    unwritten = [] if writes else range(1, generated)
    yield "read on after generate", record, record.as_one_text(2, unwritten=unwritten)
    state = Session(lm)
    with probed.recording() as record, overriding([lm], generation_config=plain):
        state.generate(first)
        generated = len(record.shapes)
        probed.read_on(state, second)
    unwritten = [] if writes else range(2, generated)
    yield "a session read on after it generated", record, record.as_one_text(2, unwritten=unwritten)


def updates_off(probed: Prepared) -> Iterator[Reading]:
    """Reads without writes of generated tokens.

    A single token is then not written, unless a session reads it as text.
    """
    chunk = probed.chunk
    with probed.without_updates() as off:
        state = Session(off.lm)
        with off.recording() as record:
            for size in (chunk + 4, 1, 1, chunk - 6, 1, chunk + 2):
                state.read(off.ids(2, size, size))
        yield "a session's single tokens with updates off", record, record.as_one_text(2)
        steps = [chunk + 4, 1, 1, chunk - 5, 1, chunk + 2]
        yield "single tokens with updates off", *streamed(off, 2, steps)


def copied_model(probed: Prepared) -> Iterator[Reading]:
    """Reads with a deep copy of the model that has other targets, and with the original."""
    rules = {index: probed.rule(index) for index in probed.layers} if isinstance(probed, Probed) else {}
    other = copy.deepcopy(probed.lm)
    for layer in fast_weights(other).values():
        scale = layer.ttt.gain if layer.ttt.proj is None else layer.ttt.proj
        scale.data = -0.5 * scale.data
    twin = type(probed)(other, probed.config, probed.seed)
    yield whole(twin, "a copy of the model", 1, 3 * twin.chunk + 2)
    name, record, text = whole(probed, "a model that was copied", 1, 3 * probed.chunk + 2)
    yield name, dataclasses.replace(record, rules=rules) if rules else record, text


OF_LOGITS = (other_arguments, contexts, caches, moved_rows, generation, copied_model)
"""The ways in which a whole model computes the same logits as in one call."""
WAYS = (*OF_LOGITS, other_inputs, documents_by_lengths, emptied_caches, updates_off)

"""L2: one call, any split of it, and token by token are the same function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import CHUNK, NAMES, RIDGE, converted, distance, logits, random_ids, streamed
from packaging.version import Version
from transformers import DynamicCache
from upstream import needs

from inplace_ttt import InPlaceTTTError, KeyWhitening, Session, UpdateClip, disable_ttt
from inplace_ttt.families import CACHE
from inplace_ttt.surgery import fast_weights

LENGTH = 5 * CHUNK + 3
SPLITS: dict[str, list[int]] = {
    "one call": [LENGTH],
    "token by token": [1] * LENGTH,
    "at chunk borders": [CHUNK, 2 * CHUNK, 2 * CHUNK, 3],
    "before borders": [CHUNK - 1, 2 * CHUNK, 1, 2 * CHUNK - 1, 4],
    "after borders": [CHUNK + 1, CHUNK, 2, CHUNK - 2, 2 * CHUNK + 2],
    "prefill, then tokens": [2 * CHUNK + 4, *[1] * (3 * CHUNK - 1)],
    "tokens, then a turn": [*[1] * 9, LENGTH - 9],
}
NEXT = {"conv": "next", "target": "hidden_states", "write_norm": "spectral"}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"conv": "causal"},
    "causal, even kernel": {"conv": "causal", "kernel_size": 4},
    "pointwise": {"kernel_size": 1},
    "kernel longer than a chunk": {"kernel_size": 17},
    "absolute clip": {"clip": UpdateClip(0.05)},
    "relative clip": {"clip": UpdateClip(0.02, relative=True, mode="always")},
    "one eta a layer": {"eta": (0.4, 2.0)},
    "detached": {"detach_target": True},
    "chunks of one": {"chunk_size": 1},
    "one chunk": {"chunk_size": LENGTH},
    "shorter than a chunk": {"chunk_size": LENGTH + 1},
    "every layer": {"layers": "every:1"},
    "whitened keys": {"whitening": KeyWhitening(), "normalize_targets": True, "eta": 3.0},
    "whitened keys, low rank, hidden states": {
        "whitening": KeyWhitening(4), "normalize_targets": True, "target": "hidden_states", "eta": 3.0,
    },
    "least squares": RIDGE,
    "least squares, all directions, hidden states": {**RIDGE, "whitening": KeyWhitening(), "target": "hidden_states"},
    "next token": {"conv": "next", "eta": 0.006},
    "next token, chunks of two": {"conv": "next", "chunk_size": 2, "eta": 0.006},
    "next token, spectral writes": {**NEXT, "eta": 0.1},
    "next token, row norms": {**NEXT, "write_norm": None, "preserve_row_norms": True, "eta": 0.02},
    "next token, both norms": {**NEXT, "preserve_row_norms": True, "eta": 0.2},
    "lookahead, both norms": {"write_norm": "spectral", "preserve_row_norms": True, "eta": 0.2},
    "least squares, raw keys, clip": {"update_rule": "ridge", "ridge": 0.5, "eta": 30.0, "clip": UpdateClip(0.05)},
}  # fmt: skip


def check_splits(model: torch.nn.Module, writes: bool = True) -> None:
    ids = random_ids(2, LENGTH)
    expected = logits(model, ids)
    with disable_ttt(model):
        assert (distance(logits(model, ids), expected) > 0.02) == writes, (
            "the writes must be visible for this test to mean anything"
        )
    for split, pieces in SPLITS.items():
        assert distance(streamed(model, ids, pieces), expected) < 5e-5, split


@pytest.mark.parametrize("target", ["embeddings", "hidden_states"])
@pytest.mark.parametrize("name", NAMES)
def test_every_split_is_one_call(name: str, target: str) -> None:
    if name == "moshi":
        needs("5.19", "pieces are not one call")
    check_splits(converted(name, target=target))


@pytest.mark.parametrize("options", OPTIONS)
def test_every_split_is_one_call_with(options: str) -> None:
    writes = OPTIONS[options].get("chunk_size", 1) < LENGTH
    check_splits(converted("llama", **OPTIONS[options]), writes)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_splits_agree_in_bfloat16(name: str) -> None:
    """Up to rounding: no further apart than twice what the same splits of the base model are."""
    model, ids = converted(name, torch.bfloat16), random_ids(2, LENGTH)

    def spread() -> float:
        one_call = logits(model, ids)
        return max(distance(streamed(model, ids, pieces), one_call) for pieces in SPLITS.values())

    with disable_ttt(model):
        rounding = spread()
    if Version(torch.__version__) < Version("2.13"):  # torch 2.8 rounds some bases alike in every split
        rounding = max(rounding, 4 * torch.finfo(torch.bfloat16).eps)
    assert 0 < spread() < 2 * rounding < 0.1


def test_a_cache_knows_what_it_read() -> None:
    model, ids = converted("llama"), random_ids(2, LENGTH)
    state = Session(model)
    for piece in ids.split(SPLITS["before borders"], 1):
        logits(model, piece, **{CACHE: state.cache}, use_cache=True)
    assert state.chunks_written == 2 * (LENGTH // CHUNK)
    assert state.state_bytes == 2 * 2 * 32 * 48 * 4  # layers, sequences, d, h, float32


def test_a_chunk_is_written_with_its_last_token_and_never_before() -> None:
    model, ids = converted("llama"), random_ids(1, 3 * CHUNK)
    state = Session(model)
    for t in range(3 * CHUNK):
        logits(model, ids[:, t : t + 1], **{CACHE: state.cache}, use_cache=True)
        assert state.chunks_written == (t + 1) // CHUNK


def test_generated_tokens_write_only_if_told_to() -> None:
    """Without update_on_decode, single tokens after a prompt read the memory and leave it as it is."""
    ids = random_ids(2, LENGTH)
    model = converted("llama", update_on_decode=False)
    state = Session(model)
    prompt, rest = ids.split([2 * CHUNK + 1, LENGTH - 2 * CHUNK - 1], 1)
    logits(model, prompt, **{CACHE: state.cache}, use_cache=True)
    decoded = torch.cat(
        [logits(model, t, **{CACHE: state.cache}, use_cache=True) for t in rest.split(1, 1)], 1
    )
    assert state.chunks_written == 2 * 2
    with_updates = logits(converted("llama"), ids)[:, prompt.shape[1] :]
    # up to here no token has seen a chunk that only decoding would write
    first_new_chunk = 3 * CHUNK - prompt.shape[1]
    assert distance(decoded[:, :first_new_chunk], with_updates[:, :first_new_chunk]) < 5e-5
    assert distance(decoded[:, first_new_chunk:], with_updates[:, first_new_chunk:]) > 0.02


def test_bfloat16_models_keep_a_float32_state() -> None:
    model = converted("llama", torch.bfloat16)
    state = Session(model)
    logits(model, random_ids(1, 2 * CHUNK), **{CACHE: state.cache}, use_cache=True)
    assert all(
        layer.fast_weight.state.dtype == torch.float32
        for layer in state.cache.layers
        if hasattr(layer, "fast_weight")
    )


@pytest.mark.parametrize(
    ("prefill", "then", "tolerance"),
    [
        (torch.inference_mode, torch.no_grad, 5e-5),
        (torch.no_grad, torch.inference_mode, 5e-5),
        (torch.no_grad, partial(torch.autocast, "cpu", dtype=torch.bfloat16), 0.1),
    ],
    ids=["inference mode, then not", "inference mode later", "autocast later"],
)
def test_a_cache_goes_on_in_another_mode(
    prefill: Callable[[], Any], then: Callable[[], Any], tolerance: float
) -> None:
    """As the base's cache does."""
    model, ids = converted("llama"), random_ids(2, LENGTH)
    cache = DynamicCache(config=model.config)
    with prefill():
        logits(model, ids[:, :20], **{CACHE: cache}, use_cache=True)
    with then():
        found = logits(model, ids[:, 20:], **{CACHE: cache}, use_cache=True)
    assert distance(found, logits(model, ids)[:, 20:]) < tolerance


def test_gradients_need_no_cache_and_say_so() -> None:
    model, ids = converted("llama"), random_ids(1, LENGTH)
    cache = DynamicCache(config=model.config)
    logits(model, ids[:, :9], **{CACHE: cache}, use_cache=True)
    with pytest.raises(InPlaceTTTError, match=r"use_cache=False or use torch\.no_grad"):
        model(input_ids=ids[:, 9:], **{CACHE: cache})
    cache = DynamicCache(config=model.config)
    assert distance(model(input_ids=ids, **{CACHE: cache}).logits.detach(), logits(model, ids)) < 5e-5
    with pytest.raises(InPlaceTTTError, match=r"filled with gradients on.*torch.no_grad"):
        logits(model, ids[:, :1], **{CACHE: cache}, use_cache=True)


def test_a_cache_of_another_batch_is_refused() -> None:
    model = converted("llama")
    cache = DynamicCache(config=model.config)
    logits(model, random_ids(2, 9), **{CACHE: cache}, use_cache=True)
    stream = cache.layers[0].fast_weight
    with pytest.raises(InPlaceTTTError, match=r"holds 2 sequences, but the batch has 3; start a new cache"):
        stream.advance(
            torch.zeros(3, 1, 32), torch.zeros(3, 1, 48), torch.zeros(3, 1, 32), [(0, 1)] * 3, None
        )


@pytest.mark.parametrize("size", [3e4, 1e-4], ids=["S beyond float16", "S near its least"])
def test_splits_agree_in_float16_whatever_the_state(size: float) -> None:
    """What is read is ηS; S alone may lie outside the range of float16."""
    model, ids = converted("llama", torch.float16, eta=1 / size), random_ids(2, LENGTH)
    with torch.no_grad():
        for layer in fast_weights(model).values():
            layer.ttt.conv.mul_(size**0.5)
            layer.ttt.proj.mul_(size**0.5)
    expected = logits(model, ids)
    assert distance(expected, logits(converted("llama"), ids)) < 0.05
    assert max(distance(streamed(model, ids, pieces), expected) for pieces in SPLITS.values()) < 0.02

"""Sessions on real models: saved, loaded, forked, forgotten; and what must be refused."""

import copy
from typing import Any

import pytest
import torch
from models import CHUNK, converted, distance, logits, random_ids
from session_runs import LONG, TOLERANCE, assert_true, carry_on, other_weights, read, session
from transformers import DynamicCache
from upstream import needs

from inplace_ttt import InPlaceTTTError, Session, disable_ttt
from inplace_ttt.checkpoint.fingerprint import fingerprint_of
from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams
from inplace_ttt.session import session as session_module
from inplace_ttt.surgery import fast_weights


@pytest.mark.parametrize("length", [5, 2 * CHUNK, LONG])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.sample(8)
def test_a_loaded_session_goes_on_bit_for_bit(model, length, batch, tmp_path):
    unbroken = session(model, random_ids(batch, length))
    unbroken.save(tmp_path / "a")
    loaded = Session.load(tmp_path / "a", model)
    assert (loaded.chunks_written, loaded.state_bytes) == (unbroken.chunks_written, unbroken.state_bytes)
    assert unbroken.chunks_written == batch * (length // CHUNK) and (unbroken.state_bytes == 0) == (
        length < CHUNK
    )
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    scores = carry_on(unbroken)
    assert torch.equal(carry_on(loaded), scores)
    assert torch.equal(loaded.tokens, unbroken.tokens)
    assert_true(model, unbroken, scores)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_loaded_session_goes_on_bit_for_bit_in_bfloat16(name, tmp_path):
    model = converted(name, dtype=torch.bfloat16)
    unbroken = session(model, random_ids(1, LONG))
    unbroken.save(tmp_path / "a")
    assert all(stream.state.dtype == torch.float32 for stream in streams(unbroken.cache).values())
    assert torch.equal(carry_on(Session.load(tmp_path / "a", model)), carry_on(unbroken))


def test_a_loaded_session_generates_like_the_unbroken_one(model, tmp_path):
    unbroken = session(model, random_ids(1, LONG))
    unbroken.save(tmp_path / "a")
    loaded = Session.load(tmp_path / "a", model)
    prompt = torch.cat([unbroken.tokens, random_ids(1, 4, seed=2)], dim=1)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    text = model.generate(prompt, **{CACHE: unbroken.cache}, **options)
    assert torch.equal(model.generate(prompt, **{CACHE: loaded.cache}, **options), text)
    assert torch.equal(model.generate(prompt, use_cache=False, **options), text)


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
@pytest.mark.parametrize("kind", ["a cache without windows", "a cache that kept more than its window"])
def test_a_sliding_session_is_loaded_as_it_was(name, kind, tmp_path):
    model = converted(name)
    state = Session(model, DynamicCache() if kind == "a cache without windows" else None)
    if kind == "a cache that kept more than its window":
        needs("5.19", "a cache that records is longer than its mask")
        state.cache.activate_past_recording()  # as assisted generation leaves it
    read(state, random_ids(1, LONG))
    state.save(tmp_path / "a")
    loaded = Session.load(tmp_path / "a", model)
    scores = carry_on(loaded)
    assert_true(model, loaded, scores)
    assert distance(carry_on(state), scores) < TOLERANCE


def test_forks_know_nothing_of_each_other(model):
    state = session(model, random_ids(1, LONG))
    left, right = state.fork(), state.fork()
    read(left, random_ids(1, 9, seed=2))
    read(right, random_ids(1, 9, seed=3))
    for branch in (left, right, state):
        assert_true(model, branch, carry_on(branch))


def test_several_readings_are_readings_without_the_kv_cache_between(model):
    ids = random_ids(2, LONG)
    found, wanted = Session(model), Session(model)
    found.read(ids, readings=3)
    for _ in range(2):
        wanted.read(ids)
        wanted = wanted.drop_kv_cache()
    wanted.read(ids)
    assert torch.equal(found.tokens, wanted.tokens) and found.chunks_written == wanted.chunks_written
    assert all(torch.equal(s.state, streams(wanted.cache)[i].state) for i, s in streams(found.cache).items())
    with pytest.raises(InPlaceTTTError, match="readings must be a whole number of at least 1, got 0"):
        found.read(ids, readings=0)


def test_forgotten_attention_leaves_the_fast_weights_alone(model):
    state = session(model, random_ids(1, 3 * CHUNK))
    forgetful = state.drop_kv_cache()
    assert forgetful.cache.get_seq_length() == 0 and forgetful.chunks_written == state.chunks_written
    text = random_ids(1, CHUNK, seed=2)
    scores = read(forgetful, text)

    written = copy.deepcopy(model)
    for index, layer in fast_weights(written).items():
        change = layer.eta * layer.readout(streams(state.cache)[index].state[0])
        if layer.ttt.keys is None:
            layer.weight.data += change if layer.weight.shape == change.shape else change.T
        else:
            layer.register_forward_hook(
                lambda own, args, out, change=change: out + own.keys(args[0]) @ change.T
            )
    with disable_ttt(written):
        assert distance(scores, logits(written, text)) < TOLERANCE
    assert distance(scores, logits(model, text)) > 0.01
    assert_true(model, state, carry_on(state))


@pytest.mark.parametrize("length", [5, LONG])
def test_a_session_of_a_float64_model_is_loaded(length, tmp_path):
    model = converted("llama", dtype=torch.float64)
    unbroken = session(model, random_ids(1, length))
    unbroken.save(tmp_path / "a")
    loaded = Session.load(tmp_path / "a", model)
    assert all(
        stream.state is None or stream.state.dtype == torch.float64
        for stream in streams(loaded.cache).values()
    )
    assert torch.equal(carry_on(loaded), carry_on(unbroken))


def test_one_model_in_two_precisions_shares_sessions(tmp_path):
    half = converted("llama", dtype=torch.bfloat16)
    full = copy.deepcopy(half).float()
    assert fingerprint_of(half) == fingerprint_of(full) != fingerprint_of(other_weights(half))
    for writer, reader in ((half, full), (full, half)):
        session(writer, random_ids(1, LONG)).save(tmp_path / "a")
        loaded = Session.load(tmp_path / "a", reader)
        scores = carry_on(loaded)
        assert scores.dtype == reader.dtype
        truth = logits(full, loaded.tokens)[:, LONG:]
        assert distance(scores.float(), truth) < 0.1


def test_a_session_that_dropped_its_kv_cache_and_read_on_is_saved(llama, tmp_path):
    """Its fast weights have read more than its tokens."""
    state = session(llama, random_ids(1, 5 * CHUNK)).drop_kv_cache()
    state.read(random_ids(1, CHUNK + 3, seed=1))
    state.save(tmp_path / "a")
    again, more = Session.load(tmp_path / "a", llama), random_ids(1, 7, seed=2)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(again.generate(more, **options), state.generate(more, **options))
    assert again.chunks_written == state.chunks_written > 5


def test_reading_and_generating_are_one_unbroken_text(model, monkeypatch):
    monkeypatch.setattr(session_module, "_READ_AT_ONCE", 6)
    state, text = Session(model), random_ids(2, 0)
    for turn, (said, new) in enumerate([(15, 9), (1, 4), (13, 8)]):
        text = torch.cat([text, random_ids(2, said, seed=turn)], dim=1)
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": -1}
        answer = state.generate(text[:, -said:], **options)
        text = model.generate(text, attention_mask=torch.ones_like(text), use_cache=False, **options)
        assert torch.equal(answer, text[:, -new:]) and torch.equal(state.tokens, text)
    assert all(stream.tokens == [text.shape[1] - 1] * 2 for stream in streams(state.cache).values())


@pytest.mark.parametrize("update_on_decode", [True, False])
@pytest.mark.parametrize("how", ["read", "generate"])
def test_a_text_read_in_pieces_is_all_taken_in(how, update_on_decode, monkeypatch):
    """Its last token is no generated token, even where it is read alone."""
    model, ids = converted("llama", update_on_decode=update_on_decode), random_ids(1, 3 * CHUNK)
    monkeypatch.setattr(session_module, "_READ_AT_ONCE", 3 * CHUNK - 1)
    state = Session(model)
    if how == "read":
        state.read(ids)
    else:
        state.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=-1)
    assert state.chunks_written == 3


def test_generating_when_all_is_read_is_exact_or_refused(llama):
    state, ids = Session(llama), random_ids(1, 20)
    state.read(ids)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": -1}
    try:
        answer = state.generate(ids[:, :0], **options)
    except InPlaceTTTError:
        return
    assert torch.equal(
        answer, llama.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)[:, 20:]
    )
    assert all(stream.tokens == [28] for stream in streams(state.cache).values())


def test_whole_numbers_of_any_kind_are_saved_as_one(llama, tmp_path):
    state = Session(llama)
    state.read(random_ids(1, LONG).int())
    state.save(tmp_path / "s")
    assert torch.equal(Session.load(tmp_path / "s", llama).tokens, state.tokens)


@pytest.mark.parametrize("before", [0, 1, 27, 28])
def test_the_last_token_of_a_text_is_text(before):
    """Also where it is all that is left to read when generation starts, and what is generated does not
    write."""
    model, ids = converted("llama", update_on_decode=False), random_ids(1, 29)
    state = Session(model)
    if before:
        state.read(ids[:, :before])
    state.generate(ids[:, before:], max_new_tokens=6, do_sample=False, eos_token_id=-1)
    assert all(stream.tokens == [29] for stream in streams(state.cache).values())

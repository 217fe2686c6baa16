"""Sessions on real models: saved, loaded, forked, forgotten; and what must be refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from models import CHUNK, RIDGE, converted, distance, logits, random_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer
from upstream import needs

from inplace_ttt import InPlaceTTTError, Session, disable_ttt
from inplace_ttt.checkpoint.fingerprint import fingerprint_of
from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams
from inplace_ttt.session import file as session_file
from inplace_ttt.session import session as session_module
from inplace_ttt.surgery import fast_weights

LONG = 25  # tokens: past the window; three chunks and four tokens
TOLERANCE = 1e-5


@torch.no_grad()
def read(state: Session, ids: Tensor) -> Tensor:
    """Logits of `ids`, read on top of the session."""
    state.tokens = ids if state.tokens is None else torch.cat([state.tokens, ids], dim=1)
    return state.model(input_ids=ids, **{CACHE: state.cache}).logits


def session(model: PreTrainedModel, ids: Tensor, cache: Any = None) -> Session:
    state = Session(model, cache)
    read(state, ids)
    return state


def carry_on(state: Session, new: int = 12) -> Tensor:
    """Some more text, then generated tokens: all their logits. The session's tokens grow by what was read."""
    scores = [read(state, random_ids(len(state.tokens), 3, seed=5))]
    for _ in range(new):
        scores.append(read(state, scores[-1][:, -1:].argmax(-1)))
    return torch.cat(scores, dim=1)


def assert_true(model: PreTrainedModel, state: Session, scores: Tensor) -> None:
    """The scores of the session's last tokens are those of one full forward without a cache."""
    assert distance(scores, logits(model, state.tokens)[:, -scores.shape[1] :]) < TOLERANCE


def assert_refused(refusal: pytest.ExceptionInfo[InPlaceTTTError], *words: str) -> None:
    message = str(refusal.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("length", [5, 2 * CHUNK, LONG])
@pytest.mark.parametrize("batch", [1, 2])
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


def other_weights(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    next(iter(fast_weights(other).values())).ttt.proj.data[0, 0] += 0.1
    return other


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (other_weights, ("other weights",)),
        (lambda model: converted("llama", chunk_size=5), ("TTT config",)),
        (lambda model: converted("llama", eta=0.5), ("TTT config",)),
        (lambda model: build("llama"), ("not converted",)),
    ],
)
def test_a_session_of_another_model_is_refused(llama, other, words, tmp_path):
    session(llama, random_ids(1, 9)).save(tmp_path / "a")
    with pytest.raises(InPlaceTTTError) as refusal:
        Session.load(tmp_path / "a", other(llama))
    assert_refused(refusal, *words)


def test_a_session_of_another_calibration_is_refused(tmp_path):
    model = converted("llama", **RIDGE)
    session(model, random_ids(1, 9)).save(tmp_path / "a")
    Session.load(tmp_path / "a", model)
    fast_weights(model)[2].ttt.keys.directions *= 1.1
    with pytest.raises(InPlaceTTTError) as refusal:
        Session.load(tmp_path / "a", model)
    assert_refused(
        refusal, "other weights, or was saved before", "into the model that wrote it, or read its text again"
    )


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


@pytest.mark.parametrize(
    "kind", ["missing", "folder", "text", "weights", "truncated header", "truncated data"]
)
def test_what_is_no_session_is_refused(llama, kind, tmp_path):
    path = tmp_path / "a"
    session(llama, random_ids(1, 9)).save(path)
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "weights":
        session_file.save_file({"weight": torch.zeros(2)}, path)
    elif kind != "missing":
        path.write_bytes(
            {"text": b"once upon a time", "truncated header": content[:100], "truncated data": content[:-50]}[
                kind
            ]
        )
    with pytest.raises(InPlaceTTTError) as refusal:
        Session.load(path, llama)
    assert_refused(refusal, str(path))


@pytest.mark.parametrize("kind", ["no such folder", "inside a file", "a folder"])
def test_a_path_that_cannot_be_written_is_refused(llama, kind, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    path = tmp_path / {"no such folder": "none/a", "inside a file": "file/a", "a folder": "folder"}[kind]
    with pytest.raises(InPlaceTTTError) as refusal:
        session(llama, random_ids(1, 9)).save(path)
    assert_refused(refusal, str(path))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize(
    "error", [OSError("no space left on device"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_a_failed_save_keeps_the_old_file_and_leaves_no_part(llama, error, tmp_path, monkeypatch):
    state = session(llama, random_ids(1, 9))
    state.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def fail(tensors: Any, path: Any, metadata: Any) -> None:
        Path(path).write_bytes(b"half a fi")
        raise error

    monkeypatch.setattr(session_file, "save_file", fail)
    read(state, random_ids(1, 9))
    with pytest.raises(InPlaceTTTError if isinstance(error, OSError) else KeyboardInterrupt):
        state.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


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


class _KeepsKeysElsewhere(DynamicLayer):
    """As quantized layers do: `keys` is only a part of them."""


@pytest.mark.parametrize("kind", ["static", "unknown"])
def test_a_cache_that_cannot_be_saved_is_refused(kind, tmp_path):
    model = converted("llama", layers=(0, 1, 2))
    cache = (
        StaticCache(config=model.config, max_cache_len=40)
        if kind == "static"
        else DynamicCache(config=model.config)
    )
    if kind == "unknown":
        cache.layers = [_KeepsKeysElsewhere() for _ in cache.layers]
    state = session(model, random_ids(1, 9), cache)
    with pytest.raises(InPlaceTTTError) as refusal:
        state.save(tmp_path / "a")
    assert_refused(refusal, "StaticLayer" if kind == "static" else "_KeepsKeysElsewhere", "DynamicCache")
    state.drop_kv_cache().save(tmp_path / "a")
    assert Session.load(tmp_path / "a", model).chunks_written == 1


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens=4"),
        ({"assistant_model": "the same"}, "remove assistant_model="),
        ({"attention_mask": torch.tensor([[1] * 22 + [0]])}, "rows cannot hold padding"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_session_that_cannot_go_on_so_says_it_and_stays(llama, options, says):
    """A session is one text for each of its sequences."""
    state = Session(llama)
    state.read(random_ids(1, 20))
    if "assistant_model" in options:
        options = {"assistant_model": llama}
    with pytest.raises(InPlaceTTTError, match=says):
        state.generate(random_ids(1, 3), max_new_tokens=3, **options)
    with pytest.raises(
        InPlaceTTTError, match="the session holds 1 sequences, but the new tokens have 2 rows"
    ):
        state.read(random_ids(2, 3))
    assert_true(llama, state, carry_on(state))


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 2], "got a list"),
        (torch.tensor([5, 6, 7]), r"got torch.int64 of shape \[3\]"),
        (torch.zeros(1, 4), "got torch.float32"),
        (torch.tensor([[3, 500]]), "token ids are 0 to 96, got 3 to 500"),
        (torch.tensor([[3, -1]]), "got -1 to 3"),
    ],
    ids=str,
)
def test_what_are_no_token_ids_is_refused_and_the_session_stays(llama, ids, says):
    state = Session(llama)
    state.read(random_ids(1, 20))
    for call in (state.read, lambda x: state.generate(x, max_new_tokens=2)):
        with pytest.raises(InPlaceTTTError, match=says):
            call(ids)
    assert_true(llama, state, carry_on(state))


def test_a_refused_batch_leaves_a_session_as_it_was(llama):
    state = session(llama, random_ids(1, LONG)).drop_kv_cache()
    with pytest.raises(InPlaceTTTError, match="1 sequences"):
        state.read(random_ids(2, 9))
    state.read(random_ids(1, 9))
    assert state.tokens.shape == (1, 9)


def test_whole_numbers_of_any_kind_are_saved_as_one(llama, tmp_path):
    state = Session(llama)
    state.read(random_ids(1, LONG).int())
    state.save(tmp_path / "s")
    assert torch.equal(Session.load(tmp_path / "s", llama).tokens, state.tokens)


@pytest.mark.parametrize("how", ["by hand", "a cache alone", "interrupted"])
def test_what_the_session_does_not_know_is_no_text_to_drop(llama, tmp_path, how, monkeypatch):
    state = Session(llama)
    state.read(random_ids(1, 20))
    if how == "interrupted":
        calls = 0
        forward = llama.forward

        def stopped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise KeyboardInterrupt
            return forward(*args, **kwargs)

        monkeypatch.setattr(llama, "forward", stopped)
        with pytest.raises(KeyboardInterrupt):
            state.generate(random_ids(1, 3), max_new_tokens=9, do_sample=False)
    else:
        with torch.no_grad():
            llama(random_ids(1, 9, seed=3), **{CACHE: state.cache})
    if how == "a cache alone":
        state = Session(llama, state.cache)
    kept = [] if how == "a cache alone" else [lambda ids: state.save(tmp_path / "s")]
    for call in (state.read, state.generate, *kept):
        with pytest.raises(InPlaceTTTError, match=r"cache has read \d+ tokens, but `tokens` holds \d+"):
            call(random_ids(1, 12))
    assert not (tmp_path / "s").exists()


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


def test_a_refused_crop_changes_nothing():
    """Of keys behind a window that are no longer there: nor the fast weights beside them."""
    model, ids = converted("gemma3"), random_ids(1, LONG)
    state, other = (session(model, ids) for _ in range(2))
    with pytest.raises(RuntimeError):
        state.cache.crop(-2)
    more = random_ids(1, 7, seed=4)
    assert torch.equal(read(state, more), read(other, more))

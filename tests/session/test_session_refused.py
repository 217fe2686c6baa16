"""What a session refuses: files, models, batches and texts; it stays as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from models import RIDGE, converted, random_ids
from session_runs import LONG, assert_refused, assert_true, carry_on, other_weights, read, session
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from inplace_ttt import InPlaceTTTError, Session
from inplace_ttt.families import CACHE
from inplace_ttt.session import file as session_file
from inplace_ttt.surgery import fast_weights


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


def test_a_refused_crop_changes_nothing():
    """Of keys behind a window that are no longer there: nor the fast weights beside them."""
    model, ids = converted("gemma3"), random_ids(1, LONG)
    state, other = (session(model, ids) for _ in range(2))
    with pytest.raises(RuntimeError):
        state.cache.crop(-2)
    more = random_ids(1, 7, seed=4)
    assert torch.equal(read(state, more), read(other, more))

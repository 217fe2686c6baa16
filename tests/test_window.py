"""The attention window: what sees what, by blocks, through a cache, over packed documents."""

from itertools import pairwise

import pytest
import torch
from families import WINDOW, build
from models import converted, distance, logits, random_ids
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from inplace_ttt import InPlaceTTTError, Session
from inplace_ttt.attention_window import attention_window, window_cache
from inplace_ttt.families import CACHE

SIZE, SINKS = 5, 2


def masked(model: PreTrainedModel, ids: Tensor, size: int = SIZE, sinks: int = SINKS) -> Tensor:
    """Logits under a mask written out token by token."""
    length = ids.shape[1]
    mask = torch.tensor(
        [[k <= q and (q - k < size or k < sinks) for k in range(length)] for q in range(length)]
    )
    return logits(
        model, ids, attention_mask=mask.expand(len(ids), 1, -1, -1), position_ids=torch.arange(length)[None]
    )


@pytest.mark.parametrize("length", [1, 2, 7, 10, 11, 15, 33])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2"])
def test_it_is_the_mask(name: str, length: int) -> None:
    model, ids = build(name), random_ids(2, length)
    expected, full = masked(model, ids), logits(model, ids)
    with attention_window(model, SIZE, SINKS):
        assert distance(logits(model, ids), expected) < 1e-5
    assert torch.equal(logits(model, ids), full), "the window is gone"
    assert length <= SIZE + SINKS or distance(full, expected) > 1e-3, (
        "the window must show for this test to mean anything"
    )


def masked_by_kind(model: PreTrainedModel, ids: Tensor, size: int) -> Tensor:
    """The same where layers have windows of `families.WINDOW`, whose layers see no sinks."""
    index = torch.arange(ids.shape[1])
    back = index[:, None] - index
    slides = (back >= 0) & (back < min(size, WINDOW))
    full = (back >= 0) & ((back < size) | (index < SINKS))
    masks = {"full_attention": full[None, None], "sliding_attention": slides[None, None]}
    return logits(model, ids, attention_mask=masks, position_ids=index[None])


@pytest.mark.parametrize("size", [WINDOW - 2, WINDOW, WINDOW + 4])
@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_layers_with_a_window_keep_the_smaller_and_see_no_sinks(name: str, size: int) -> None:
    """At once and through a cache, which keeps no more than each layer needs."""
    model, ids = build(name), random_ids(2, 45)
    assert {"sliding_attention", "full_attention"} <= set(
        model.config.layer_types
    ) and model.config.sliding_window == WINDOW
    expected = masked_by_kind(model, ids, size)
    with attention_window(model, size, SINKS), torch.no_grad():
        assert distance(logits(model, ids), expected) < 1e-5
        cache = window_cache(model, size, SINKS)
        found = torch.cat(
            [model(input_ids=part, **{CACHE: cache}).logits for part in ids.split([20, 1, 1, 23], 1)], 1
        )
    assert distance(found, expected) < 1e-5
    kept = {"full_attention": SINKS + size - 1, "sliding_attention": min(size, WINDOW) - 1}
    assert [layer.keys.shape[-2] for layer in cache.layers] == [
        kept[kind] for kind in model.config.layer_types
    ]


def test_where_every_layer_has_a_window() -> None:
    model, ids = build("mistral"), random_ids(2, 45)
    expected = masked(model, ids, WINDOW - 2, sinks=0)
    with attention_window(model, WINDOW - 2, SINKS), torch.no_grad():
        assert distance(logits(model, ids), expected) < 1e-5
        cache = window_cache(model, WINDOW - 2, SINKS)
        assert (
            distance(
                torch.cat([model(input_ids=part, **{CACHE: cache}).logits for part in ids.split(9, 1)], 1),
                expected,
            )
            < 1e-5
        )


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("pieces", [[33], [1] * 33, [4, 20, 9], [30, 1, 1, 1]], ids=str)
def test_a_cache_keeps_what_it_needs_and_no_more(pieces: list[int], sinks: int) -> None:
    model, ids = build("llama"), random_ids(2, 33)
    with attention_window(model, SIZE, sinks), torch.no_grad():
        expected = logits(model, ids)
        cache = window_cache(model, SIZE, sinks)
        found = torch.cat(
            [
                model(input_ids=ids[:, a:b], **{CACHE: cache}).logits
                for a, b in pairwise([0, *torch.tensor(pieces).cumsum(0).tolist()])
            ],
            1,
        )
    assert distance(found, expected) < 1e-5
    assert cache.layers[0].keys.shape[-2] == sinks + SIZE - 1 and cache.get_seq_length() == 33


@pytest.mark.parametrize("pieces", [[6], [4, 2], [1] * 6], ids=str)
@pytest.mark.parametrize("before", [3, 8, 30])
@pytest.mark.parametrize("sinks", [0, SINKS])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_is_taken_back_was_never_read(name: str, sinks: int, before: int, pieces: list[int]) -> None:
    """However many forwards it took to read it, and again; afterwards no more is kept than ever."""
    model, ids, others = build(name), random_ids(2, before + 9), random_ids(2, 6, seed=2)
    cache, fresh = (window_cache(model, SIZE, sinks) for _ in range(2))
    with attention_window(model, SIZE, sinks), torch.no_grad():
        expected = logits(model, ids)[:, before:]
        model(input_ids=ids[:, :before], **{CACHE: cache})
        cache.activate_past_recording()
        for _ in range(2):
            for piece in others.split(pieces, 1):
                model(input_ids=piece, **{CACHE: cache})
            cache.crop(-6)
        found = [model(input_ids=piece, **{CACHE: cache}).logits for piece in ids[:, before:].split(3, 1)]
        model(input_ids=ids, **{CACHE: fresh})
    assert distance(torch.cat(found, 1), expected) < 1e-5 and cache.get_seq_length() == before + 9
    cache.crop(0)
    for kept, needed in zip(cache.layers, fresh.layers, strict=True):
        assert torch.allclose(kept.keys, needed.keys, atol=1e-5) and torch.allclose(
            kept.values, needed.values, atol=1e-5
        )


def test_what_is_kept_no_more_cannot_be_taken_back() -> None:
    model, ids = build("llama"), random_ids(1, 30)
    cache = window_cache(model, SIZE, SINKS)
    with attention_window(model, SIZE, SINKS), torch.no_grad():
        model(input_ids=ids[:, : SINKS + SIZE - 1], **{CACHE: cache})
        cache.crop(-2)
        assert cache.get_seq_length() == SINKS + SIZE - 3, "all of it is there, recorded or not"
        model(input_ids=ids, **{CACHE: cache})
        before = cache.layers[0].keys
        with pytest.raises(InPlaceTTTError, match="the last 1 tokens cannot be taken back"):
            cache.crop(-1)
        assert cache.layers[0].keys is before and cache.get_seq_length() == SINKS + SIZE - 3 + 30
        cache.activate_past_recording()
        model(input_ids=ids[:, :2], **{CACHE: cache})
        with pytest.raises(InPlaceTTTError, match="the last 3 tokens cannot be taken back"):
            cache.crop(-3)
        cache.crop(-2)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompt_lookup_equals_greedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, taken = converted(name), random_ids(1, 6).repeat(1, 4), []
    crop = Cache.crop
    monkeypatch.setattr(Cache, "crop", lambda cache, tokens: taken.append(tokens) or crop(cache, tokens))
    settings = {
        "max_new_tokens": 30,
        "do_sample": False,
        "eos_token_id": -1,
        "attention_mask": torch.ones_like(ids),
    }
    with attention_window(model, SIZE, SINKS):
        greedy = model.generate(ids, **settings)
        found = model.generate(
            ids, **settings, prompt_lookup_num_tokens=3, **{CACHE: window_cache(model, SIZE, SINKS)}
        )
    assert torch.equal(found, greedy) and min(taken) < 0


def test_a_prompt_is_written_through_it() -> None:
    model = converted("llama", conv="next", target="hidden_states", prompt_write={"eta": 1.0, "cap": 0.3})
    prompt, then, found = random_ids(1, 40), random_ids(1, 6, seed=2), []
    with attention_window(model, SIZE, SINKS), torch.no_grad():
        for cache in (DynamicCache(config=model.config), window_cache(model, SIZE, SINKS)):
            session = Session(model, cache)
            session.write_prompt(prompt)
            found.append(model(torch.cat([prompt[:, -1:], then], 1), **{CACHE: cache}).logits)
    assert distance(*found) < 1e-5


def test_packed_documents_have_windows_and_sinks_of_their_own() -> None:
    model, ids = build("llama"), random_ids(1, 40)
    lengths = [13, 4, 23]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with attention_window(model, SIZE, SINKS):
        alone = torch.cat([logits(model, document) for document in ids.split(lengths, 1)], 1)
        assert distance(logits(model, ids, position_ids=positions), alone) < 1e-5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_positions_that_are_filled_anew_are_looked_at_anew(mode: type) -> None:
    model, ids = build("llama"), random_ids(1, 40)
    packed = torch.cat([torch.arange(13), torch.arange(27)])[None]
    with attention_window(model, SIZE, SINKS), mode():
        positions = torch.arange(40)[None].clone()
        whole = logits(model, ids, position_ids=positions)
        positions.copy_(packed)
        assert (
            distance(logits(model, ids, position_ids=positions), logits(model, ids, position_ids=packed))
            < 1e-6
        )
        assert distance(logits(model, ids, position_ids=packed), whole) > 1e-3


def test_packed_positions_are_asked_about_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer waits for the device."""
    model, ids, asked = build("llama"), random_ids(1, 40), []
    diff = Tensor.diff
    monkeypatch.setattr(
        Tensor, "diff", lambda x, *args, **kwargs: asked.append(x) or diff(x, *args, **kwargs)
    )
    with attention_window(model, SIZE, SINKS):
        for forwards in (1, 2):
            logits(model, ids, position_ids=torch.arange(40)[None])
            assert model.config.num_hidden_layers > 1 and len(asked) == forwards


def test_gradients_flow_through_the_blocks() -> None:
    model, ids = build("llama", dtype=torch.float64), random_ids(1, 33)
    grads = []
    for windowed in (False, True):
        model.zero_grad()
        with attention_window(model, SIZE if windowed else None, SINKS):
            if windowed:
                out = model(input_ids=ids, use_cache=False).logits
            else:
                mask = torch.tensor(
                    [[k <= q and (q - k < SIZE or k < SINKS) for k in range(33)] for q in range(33)]
                )
                out = model(
                    input_ids=ids,
                    attention_mask=mask[None, None],
                    position_ids=torch.arange(33)[None],
                    use_cache=False,
                ).logits
        out.square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert all(distance(grads[1][name], grads[0][name]) < 1e-9 for name in grads[0])


@pytest.mark.parametrize(("size", "sinks"), [(0, 0), (4, 4), (4, -1)])
def test_no_such_window(size: int, sinks: int) -> None:
    with (
        pytest.raises(InPlaceTTTError, match="does not exist"),
        attention_window(build("llama"), size, sinks),
    ):
        pass


def test_what_it_does_not_go_with() -> None:
    model, ids = build("llama"), random_ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(InPlaceTTTError, match="padding"), attention_window(model, SIZE, SINKS):
        logits(model, ids, attention_mask=mask)
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with (
        pytest.raises(InPlaceTTTError, match="layers of chunked_attention"),
        attention_window(model, SIZE, SINKS),
    ):
        pass


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_of_slots_made_beforehand_is_refused(name: str) -> None:
    """Not what its empty slots hold."""
    model, ids = build(name), random_ids(2, 20)
    settings = {
        "max_new_tokens": 3,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "disable_compile": True,
    }
    with attention_window(model, SIZE, SINKS), torch.no_grad():
        for prompt in (ids, ids[:, :1]):
            cache = StaticCache(model.config, max_cache_len=40)
            with pytest.raises(InPlaceTTTError, match="static cache"):
                model(input_ids=prompt, **{CACHE: cache})
        with pytest.raises(InPlaceTTTError, match="static cache"):
            model.generate(ids, cache_implementation="static", **settings)
        model.generate(ids, **settings)
    cache = StaticCache(model.config, max_cache_len=40)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
        with attention_window(model, SIZE, SINKS), pytest.raises(InPlaceTTTError, match="static cache"):
            model(input_ids=ids[:, :20], **{CACHE: cache})

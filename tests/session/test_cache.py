"""What transformers and users do to a cache, on real models, against reading the same tokens afresh."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CHUNK, converted, distance, logits, random_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from upstream import needs

from inplace_ttt import InPlaceTTTError, Session, disable_ttt
from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams

TOLERANCE = 1e-5
RESET = "DynamicCache.reset keeps the length"


@torch.no_grad()
def read(model: PreTrainedModel, cache: Any, ids: Tensor, **arguments: Any) -> Tensor:
    return model(input_ids=ids, **{CACHE: cache}, **arguments).logits


class Batch:
    """Left-padded rows of different lengths in one cache, and the same tokens row by row."""

    def __init__(self, model: PreTrainedModel, *lengths: int) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.rows = [random_ids(1, length, seed=length) for length in lengths]
        width = max(lengths)
        self.mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
        self._forward(
            torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in self.rows])
        )

    def _forward(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return read(self.model, self.cache, ids, attention_mask=self.mask, position_ids=positions)

    def select(self, rows: list[int]) -> None:
        self.rows, self.mask = [self.rows[row] for row in rows], self.mask[rows]

    def assert_reads_like_alone(self) -> None:
        for seed, length in enumerate((1, 5, 1, 9)):
            text = random_ids(len(self.rows), length, seed=seed)
            self.mask = torch.cat([self.mask, torch.ones_like(text)], dim=1)
            scores = self._forward(text)
            self.rows = [torch.cat([ids, text[row : row + 1]], dim=1) for row, ids in enumerate(self.rows)]
            for row, ids in enumerate(self.rows):
                assert distance(scores[row : row + 1], logits(self.model, ids)[:, -length:]) < TOLERANCE


OPERATIONS: dict[str, tuple[Callable[[Any], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
    "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_are_moved_with_their_memory(model, operation):
    batch = Batch(model, 11, 18, 25)
    apply, rows = OPERATIONS[operation]
    apply(batch.cache)
    batch.select(rows)
    batch.assert_reads_like_alone()


def test_a_deep_copy_is_another_cache(model):
    batch = Batch(model, 11, 18, 25)
    fork = copy.copy(batch)
    fork.cache = copy.deepcopy(batch.cache)
    fork.assert_reads_like_alone()
    batch.assert_reads_like_alone()


def test_reset_forgets_everything(model):
    needs("5.19", RESET)
    cache = DynamicCache(config=model.config)
    ids = random_ids(2, 20, seed=2)
    read(model, cache, random_ids(2, 25))
    cache.reset()
    scores = torch.cat([read(model, cache, piece) for piece in ids.split([9, 1, 10], dim=1)], dim=1)
    assert distance(scores, logits(model, ids)) < TOLERANCE


@pytest.mark.parametrize(
    ("pieces", "removed"), [((12, 3), 2), ((12, 3), 1), ((6, 9), 6), ((10, 1, 1, 1, 1), 3), ((12,), 12)]
)
def test_crop_leaves_no_trace(model, pieces, removed):
    cache, ids = DynamicCache(config=model.config), random_ids(1, sum(pieces))
    for piece in ids.split(pieces, dim=1):
        read(model, cache, piece)
    cache.crop(-removed)
    both = torch.cat([ids[:, : sum(pieces) - removed], random_ids(1, 14, seed=2)], dim=1)
    assert distance(read(model, cache, both[:, -14:]), logits(model, both)[:, -14:]) < TOLERANCE


@pytest.mark.parametrize("layers", [(0, 2), (2,)])
def test_a_refused_crop_changes_nothing_or_ends_the_session(layers):
    """Layers below the first TTT layer are cropped before it can refuse."""
    model, ids = converted("llama", layers=layers), random_ids(1, 30)
    cache = DynamicCache(config=model.config)
    read(model, cache, ids[:, :25])
    with pytest.raises(InPlaceTTTError):
        cache.crop(-15)
    try:
        scores = torch.cat([read(model, cache, ids[:, t : t + 1]) for t in range(25, 30)], dim=1)
    except InPlaceTTTError:
        return
    assert distance(scores, logits(model, ids)[:, 25:]) < TOLERANCE


def test_ttt_disabled_leaves_the_memory_untouched(model):
    cache, ids = DynamicCache(config=model.config), random_ids(1, 20)
    read(model, cache, ids)
    before = copy.deepcopy(streams(cache))
    text = random_ids(1, 9, seed=2)
    with disable_ttt(model):
        scores = read(model, cache, text)
    for index, stream in streams(cache).items():
        assert stream.tokens == before[index].tokens == [20]
        held, was = stream.tensors(), before[index].tensors()
        assert all(torch.equal(held[name], was[name]) for name in ("state", "z", "x"))
    assert distance(scores, logits(model, torch.cat([ids, text], dim=1))[:, 20:]) > 0.01


@pytest.mark.parametrize("removed", [4, 6, 14])
def test_crop_over_tokens_read_with_ttt_off_is_exact_or_refused(llama, removed):
    cache, ids = DynamicCache(config=llama.config), random_ids(1, 12)
    read(llama, cache, ids)
    with disable_ttt(llama):
        read(llama, cache, random_ids(1, 4, seed=2))
    try:
        cache.crop(-removed)
    except InPlaceTTTError:
        return
    ids = torch.cat([ids[:, : 16 - removed], random_ids(1, 20, seed=3)], dim=1)
    assert distance(read(llama, cache, ids[:, -20:]), logits(llama, ids)[:, -20:]) < TOLERANCE


@pytest.mark.parametrize("first", [5, CHUNK, 20])
def test_a_cache_filled_in_inference_mode_goes_on_outside(llama, first):
    cache, ids = DynamicCache(config=llama.config), random_ids(1, 34)
    with torch.inference_mode():
        llama(input_ids=ids[:, :first], **{CACHE: cache})
    scores = [read(llama, cache, ids[:, first:27])]
    cache.crop(-1)
    scores = [*scores[:-1], scores[-1][:, :-1], read(llama, cache, ids[:, 26:])]
    with torch.inference_mode():
        text = random_ids(1, 9, seed=2)
        scores.append(llama(input_ids=text, **{CACHE: cache}).logits)
    assert (
        distance(torch.cat(scores, dim=1), logits(llama, torch.cat([ids, text], dim=1))[:, first:])
        < TOLERANCE
    )


def with_gradients(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    return model(input_ids=ids, **{CACHE: cache}).logits


def test_gradients_flow_through_a_fresh_cache(model):
    ids = random_ids(2, 20)
    grads = []
    for cache in (None, DynamicCache(config=model.config)):
        model.zero_grad()
        scores = model(input_ids=ids, **{CACHE: cache}, use_cache=cache is not None).logits
        scores.log_softmax(-1)[..., 0].sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    assert grads[0].keys() == grads[1].keys() and any("ttt" in name for name in grads[0])
    assert all(distance(grads[1][name], grad) < TOLERANCE for name, grad in grads[0].items() if grad.any())


def test_a_cache_filled_with_gradients_is_never_gone_on_from(llama, tmp_path):
    ids = random_ids(1, 20)
    state = Session(llama)
    with_gradients(llama, ids, state.cache)
    for use in (
        lambda: with_gradients(llama, ids, state.cache),
        lambda: read(llama, state.cache, ids),
        lambda: state.save(tmp_path / "a"),
        state.fork,
        lambda: (state.cache.crop(-3), read(llama, state.cache, ids)),
    ):
        with pytest.raises(InPlaceTTTError, match="gradients"):
            use()
    assert not list(tmp_path.iterdir())
    needs("5.19", RESET)
    state.cache.reset()
    assert distance(read(llama, state.cache, ids), logits(llama, ids)) < TOLERANCE


def test_a_session_does_not_take_gradients(llama):
    cache, ids = DynamicCache(config=llama.config), random_ids(1, 20)
    read(llama, cache, ids[:, :12])
    with pytest.raises(InPlaceTTTError, match="gradients"):
        with_gradients(llama, ids[:, 12:], cache)


def test_packed_rows_with_a_cache_are_refused(llama):
    ids = random_ids(1, 20)
    ends = torch.tensor([0, 9, 20], dtype=torch.int32)
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    for arguments in (packed, {"position_ids": positions}, {"position_ids": positions, **packed}):
        with pytest.raises(InPlaceTTTError, match="use_cache=False"):
            read(llama, DynamicCache(config=llama.config), ids, **arguments)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_mask_as_long_as_the_cache_is_exact(llama, kind):
    """Attention takes a mask that goes on behind the tokens read so far; its last columns are not theirs."""
    cache = (
        StaticCache(config=llama.config, max_cache_len=40)
        if kind == "static"
        else DynamicCache(config=llama.config)
    )
    ids = random_ids(1, 30)
    scores = []
    for start, stop in ((0, 20), (20, 30)):
        mask = (torch.arange(40) < stop).long()[None]
        scores.append(read(llama, cache, ids[:, start:stop], attention_mask=mask))
    assert distance(torch.cat(scores, dim=1), logits(llama, ids)) < TOLERANCE


@pytest.mark.parametrize("of", ["the language model", "its decoder"])
def test_a_cache_goes_by_every_name_that_transformers_has_for_it(llama: PreTrainedModel, of: str) -> None:
    """`cache` from 5.24 on, `past_key_values` before and until 5.40."""
    ids, found = random_ids(1, 2 * CHUNK + 3), []
    reader = llama if of == "the language model" else llama.model
    for name in {CACHE, "past_key_values"}:
        cache = DynamicCache(config=llama.config)
        with torch.no_grad():
            pieces = [reader(input_ids=piece, **{name: cache})[0] for piece in ids.split(CHUNK + 1, dim=1)]
        assert {stream.written[0] for stream in streams(cache).values()} == {2}
        found.append(torch.cat(pieces, dim=1))
    with torch.no_grad():
        whole = reader(input_ids=ids, use_cache=False)[0]
    assert all(distance(pieces, whole) < TOLERANCE for pieces in found)


def test_no_call_of_ours_is_by_a_name_that_goes(llama: PreTrainedModel, tmp_path: Path) -> None:
    state = Session(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        state.read(random_ids(1, CHUNK + 3))
        state.generate(random_ids(1, 2), max_new_tokens=3, do_sample=False)
        state.save(tmp_path / "session")
        Session.load(tmp_path / "session", llama).read(random_ids(1, CHUNK))

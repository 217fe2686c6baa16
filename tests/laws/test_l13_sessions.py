"""L13 in sessions, caches, copies and checkpoints, and what `target: gradient` refuses."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from models import distance, random_ids
from plain_gradient_steps import CHUNK, LAYERS, LENGTH, SOLVED, SUM, TOLERANCE, reading
from torch import Tensor
from transformers import DynamicCache, StaticCache

from inplace_ttt import (
    InPlaceTTTConfig,
    InPlaceTTTError,
    Session,
    convert,
    disable_ttt,
    load,
    revert,
)
from inplace_ttt.checkpoint.to_adapter import save_adapter
from inplace_ttt.families import CACHE, locate
from inplace_ttt.layer.cache import streams
from inplace_ttt.rules import SumRule


@pytest.mark.parametrize("rule", [SUM, SOLVED], ids=["sum", "ridge"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_sessions_fork_are_saved_and_go_on(name: str, rule: dict[str, Any], tmp_path: Path) -> None:
    _, model = reading(name, **rule)
    ids = random_ids(1, 32)
    whole = Session(model)
    whole.read(ids[:, :30])
    wanted = whole.generate(ids[:, 30:], max_new_tokens=12, do_sample=False)
    for cut in (3, 14, 25):
        session = Session(model)
        session.read(ids[:, :cut])
        session.save(tmp_path / "session")
        for other in (session.fork(), Session.load(tmp_path / "session", model)):
            other.read(ids[:, cut:30])
            assert torch.equal(other.generate(ids[:, 30:], max_new_tokens=12, do_sample=False), wanted), cut
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids, **given)[:, 32:], wanted)


def test_a_session_without_its_kv_cache_keeps_what_was_written() -> None:
    _, model = reading("llama")
    session = Session(model)
    session.read(random_ids(1, 18))
    left = session.drop_kv_cache()
    states = [{i: s.state for i, s in streams(one.cache).items()} for one in (session, left)]
    assert all(torch.equal(states[0][i], states[1][i]) for i in LAYERS)
    left.read(random_ids(1, 9, seed=3))  # the open chunk, whose tokens cannot be read again, begins anew
    assert next(iter(streams(left.cache).values())).written == [3]


def test_beams_keep_the_state_of_the_beam_that_they_follow() -> None:
    _, model = reading("llama")
    ids, given = random_ids(2, 12), {"max_new_tokens": 10, "do_sample": False, "num_beams": 3}
    both = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    for row, found in zip(ids, both, strict=True):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **given)[0]
        assert torch.equal(alone, found[: len(alone)])


def test_inference_mode_reads_and_writes_as_ever() -> None:
    _, model = reading("llama")
    ids = random_ids(2, 12)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}

    def answers() -> list[Tensor]:
        session = Session(model)
        session.read(ids[:1].clone())
        branch = session.fork()
        branch.read(random_ids(1, 20))
        generated = [model.generate(ids.clone(), num_beams=beams, **given) for beams in (1, 3)]
        return [*generated, branch.generate(ids[:1], max_new_tokens=9, do_sample=False)]

    wanted = answers()
    with torch.inference_mode():
        found = answers()
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("read", [21, 23], ids=["whole chunks", "an open chunk"])
def test_tokens_can_be_taken_back(read: int) -> None:
    """Into the last chunk that was written, too; then the tokens after it come with positions, as `generate`
    gives them."""
    _, model = reading("llama")
    ids, other = random_ids(1, 30), random_ids(1, 8, seed=9)
    with torch.no_grad():
        wanted = Session(model)
        wanted.read(torch.cat([ids[:, :20], other], 1))
        found = DynamicCache(config=model.config)
        model(input_ids=ids[:, :read], **{CACHE: found})
        found.crop(20 - read)
        model(input_ids=other, position_ids=torch.arange(20, 28)[None], **{CACHE: found})
    for index, stream in streams(found).items():
        assert distance(stream.state, streams(wanted.cache)[index].state) < TOLERANCE[torch.float64]


def test_copies_read_alike_and_a_reverted_model_is_the_base() -> None:
    base, model = reading("llama")
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(input_ids=ids).logits, wanted)
        assert getattr(model(input_ids=ids, use_cache=False), CACHE) is None
        with disable_ttt(model):
            assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
        assert torch.equal(revert(model)(input_ids=ids).logits, base(input_ids=ids).logits)
    assert type(locate(model).base) is type(locate(base).base)


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_checkpoints_read_alike(form: str, tmp_path: Path) -> None:
    base, model = reading("llama", torch.float32)
    base.save_pretrained(tmp_path / "base")
    if form == "full":
        model.save_pretrained(tmp_path / "model")
    else:
        save_adapter(model, tmp_path / "model", base=str(tmp_path / "base"))
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "model")(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_decoded_token_looks_through_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = reading("llama")
    cache = DynamicCache(config=model.config)
    looked: list[object] = []
    own = torch.nn.Module.named_modules

    def named_modules(self: Any, *args: Any, **kwargs: Any) -> Any:
        looked.append(self)
        return own(self, *args, **kwargs)

    with torch.no_grad():
        model(random_ids(1, 3), **{CACHE: cache})
        monkeypatch.setattr(torch.nn.Module, "named_modules", named_modules)
        model(random_ids(1, 1), **{CACHE: cache})
    assert not looked


def test_what_it_cannot_do_is_refused() -> None:
    _, model = reading("llama", torch.float32)
    ids = random_ids(1, LENGTH)
    with pytest.raises(
        InPlaceTTTError, match=r"trains on whole rows, without a cache; .* call model\.eval\(\)"
    ):
        model.train()(input_ids=ids, **{CACHE: DynamicCache(config=model.config)})
    with pytest.raises(InPlaceTTTError, match=r"steps_per_chunk above 1 .* cannot be trained; set it to 1"):
        reading("llama", torch.float32, **SUM, steps_per_chunk=2)[1].train()(input_ids=ids)
    with pytest.raises(InPlaceTTTError, match="does nothing without target='gradient'"):
        InPlaceTTTConfig(steps_per_chunk=2)
    model.eval()
    with pytest.raises(InPlaceTTTError, match="pass input_ids alone"):
        model(inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(InPlaceTTTError, match=r"this cache has a StaticLayer; use a DynamicCache"):
        model(input_ids=ids, **{CACHE: StaticCache(config=model.config, max_cache_len=64)})
    with pytest.raises(InPlaceTTTError, match="leave output_attentions out"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(InPlaceTTTError, match="packed in a row with a cache"):
        model(
            input_ids=ids,
            position_ids=torch.arange(LENGTH // 2).repeat(2)[None],
            **{CACHE: DynamicCache(config=model.config)},
        )
    holes = torch.ones_like(ids)
    holes[0, 10] = 0
    with pytest.raises(InPlaceTTTError):
        model(input_ids=ids, attention_mask=holes)
    fresh = convert(build("llama"), InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK, target="gradient"))
    with pytest.raises(InPlaceTTTError, match=r"not measured yet; run inplace_ttt\.calibrate"):
        fresh(input_ids=ids)
    assert SumRule() == InPlaceTTTConfig(target="gradient").rule


def test_a_model_that_reads_images_and_a_split_input_are_refused() -> None:
    gradient = InPlaceTTTConfig(layers=LAYERS, chunk_size=CHUNK, target="gradient")
    model = build("llama")
    model.config.vision_config = {}
    with pytest.raises(InPlaceTTTError, match="reads text alone, but this model reads images too"):
        convert(model, gradient)
    assert gradient.wanting_whole_input == ["target='gradient'"]

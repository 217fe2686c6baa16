"""TTT-NTP's inference: one ridge regression over the end of a prompt, against its formulas in plain torch on
the patched base."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from models import CHUNK, converted, distance, logits, random_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from inplace_ttt import InPlaceTTTError, Session, disable_ttt, revert
from inplace_ttt.config_tables import PromptWrite
from inplace_ttt.evaluation.harness.prompt_lm import PromptLM
from inplace_ttt.evaluation.token_losses import token_losses
from inplace_ttt.families import CACHE
from inplace_ttt.layer.cache import streams
from inplace_ttt.layer.prompt_stream import ridge_write
from inplace_ttt.session import file as session_file
from inplace_ttt.surgery import fast_weights

WRITES: dict[str, dict[str, Any]] = {
    "as evaluated": {},
    "a window": {"window": 9},
    "free": {"cap": None, "eta": 1.0},
    "raw rows": {"preserve_row_norms": False, "cap": 0.3, "eta": 0.5},
}


def prompted(name: str = "llama", dtype: torch.dtype = torch.float32, **write: Any) -> PreTrainedModel:
    return converted(
        name, dtype, conv="next", target="hidden_states", prompt_write={"eta": 1.0, "cap": 0.3, **write}
    )


@torch.no_grad()
def by_hand(model: PreTrainedModel, prompt: Tensor, then: Tensor, write: PromptWrite) -> Tensor:
    """Logits of the prompt's last token and of `then`, of one sequence: the base's weights are replaced after
    the prompt."""
    model = copy.deepcopy(model)
    projections = {index: layer.ttt.proj.double() for index, layer in fast_weights(model).items()}
    base = revert(model)
    seen: dict[tuple[int, str], Tensor] = {}
    handles = []
    for index in projections:
        mlp = base.model.layers[index].mlp
        for name, module in (("x", mlp), ("z", mlp.down_proj)):
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, at=(index, name): seen.update({at: args[0][0].double()})
                )
            )
    base(prompt, use_cache=False)
    for handle in handles:
        handle.remove()
    cache = DynamicCache(config=base.config)
    base(prompt[:, :-1], **{CACHE: cache})
    for index, proj in projections.items():
        weight = base.model.layers[index].mlp.down_proj.weight
        w, z, x = weight.double(), seen[index, "z"], seen[index, "x"]
        k, v = z[:-1][-write.window :], (x[1:] @ proj)[-write.window :]
        change = (v - k @ w.T).T @ k @ torch.linalg.inv(k.T @ k + write.ridge * torch.eye(k.shape[1]))
        eta = write.eta if write.cap is None else min(write.eta, write.cap * float(w.norm() / change.norm()))
        new = w + eta * change
        if write.preserve_row_norms:
            new = new * (w.norm(dim=1) / new.norm(dim=1))[:, None]
        weight.copy_(new)
    rest = torch.cat([prompt[:, -1:], then], 1)
    return torch.cat([base(token, **{CACHE: cache}).logits for token in rest.split(1, 1)], 1)


@torch.no_grad()
def in_a_session(model: PreTrainedModel, prompt: Tensor, then: Tensor) -> Tensor:
    state = Session(model)
    state.write_prompt(prompt)
    rest = torch.cat([prompt[:, -1:], then], 1)
    return torch.cat([model(token, **{CACHE: state.cache}).logits for token in rest.split(1, 1)], 1)


@pytest.mark.parametrize("length", [3, 20, 70])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_session_is_the_patched_base(name: str, write: str, length: int) -> None:
    model = prompted(name, **WRITES[write])
    settings = PromptWrite(**{"eta": 1.0, "cap": 0.3, **WRITES[write]})
    prompt, then = random_ids(1, length), random_ids(1, 6, seed=4)
    found, expected = in_a_session(model, prompt, then), by_hand(model, prompt, then, settings)
    assert distance(found, expected) < 1e-4
    with disable_ttt(model):
        assert distance(logits(model, torch.cat([prompt, then], 1))[:, length - 1 :], expected) > 0.02


def matrices(m: int, h: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((m, h), (m, d), (d, h)))  # type: ignore[return-value]


@pytest.mark.parametrize("m", [4, 12, 40])
def test_the_write_is_the_best_change(m: int) -> None:
    """What torch.linalg.lstsq finds, with √λ I and 0 as further rows; more pairs than keys are wide, and
    fewer."""
    k, v, w0 = matrices(m, 12, 5)
    found = ridge_write(k, v, w0, PromptWrite(ridge=0.7, eta=1.0, cap=None))
    rows = torch.cat([k, 0.7**0.5 * torch.eye(12, dtype=k.dtype)])
    wanted = torch.linalg.lstsq(rows, torch.cat([v - k @ w0.T, torch.zeros(12, 5, dtype=k.dtype)])).solution.T
    assert distance(found, wanted) < 1e-10


def test_the_cap_and_what_needs_no_write() -> None:
    k, v, w0 = matrices(20, 12, 5)
    capped = ridge_write(k, v, w0, PromptWrite(eta=1.0, cap=0.1))
    assert abs(float(capped.norm() / w0.norm()) - 0.1) < 1e-12
    small = ridge_write(k, v, w0, PromptWrite(eta=1e-3, cap=0.1))
    assert distance(small / 1e-3, ridge_write(k, v, w0, PromptWrite(eta=1.0, cap=None))) < 1e-10
    assert not ridge_write(k, k @ w0.T, w0, PromptWrite()).any()


@torch.no_grad()
def pieces(model: PreTrainedModel, prompt: Tensor, sizes: list[int]) -> Session:
    state = Session(model)
    for piece in prompt[:, :-1].split(sizes, 1):
        model(piece, **{CACHE: state.cache})
        state.tokens = piece if state.tokens is None else torch.cat([state.tokens, piece], 1)
    state.write_prompt(prompt[:, -1:])
    return state


@pytest.mark.parametrize("window", [5, 16, 8192])
def test_any_split_of_a_prompt_is_one_call(window: int) -> None:
    model, prompt = prompted(window=window), random_ids(2, 41)
    expected = {i: s.state for i, s in streams(pieces(model, prompt, [40]).cache).items()}
    for sizes in ([1] * 40, [17, 23], [39, 1], [3, 30, 7]):
        for index, stream in streams(pieces(model, prompt, sizes).cache).items():
            assert distance(stream.state, expected[index]) < 1e-4


def test_what_is_kept_of_a_prompt_is_bounded() -> None:
    model, state = prompted(window=10), Session(prompted(window=10))
    state = Session(model)
    for piece in random_ids(2, 300).split([200, *[1] * 100], 1):
        logits(model, piece, **{CACHE: state.cache}, use_cache=True)
        assert all(end.held < 22 for stream in streams(state.cache).values() for end in stream.ends)
    state.tokens = random_ids(2, 300)
    state.write_prompt(random_ids(2, 1))
    assert all(
        end.held == 0 and not end.pieces for stream in streams(state.cache).values() for end in stream.ends
    )


def test_rows_of_a_batch_are_independent() -> None:
    model, rows, then = prompted(), [random_ids(1, 30, seed=s) for s in (1, 2)], random_ids(1, 5, seed=3)
    together = in_a_session(model, torch.cat(rows), then.expand(2, -1))
    for row, found in zip(rows, together.split(1), strict=True):
        assert distance(found, in_a_session(model, row, then)) < 1e-4


def test_generation_writes_the_prompt_and_nothing_else() -> None:
    model, prompt = prompted(), random_ids(2, 30)
    state = Session(model)
    new = state.generate(prompt, max_new_tokens=3 * CHUNK, do_sample=False, eos_token_id=None)
    held = {i: s.state.clone() for i, s in streams(state.cache).items()}
    assert state.chunks_written == 2
    expected = in_a_session(model, prompt, new[:, :-1]).argmax(-1)
    assert torch.equal(new, expected)
    state.generate(random_ids(2, 9, seed=5), max_new_tokens=4, do_sample=False)
    assert all(torch.equal(s.state, held[i]) for i, s in streams(state.cache).items())


def test_short_prompts_write_nothing() -> None:
    model = prompted()
    for length in (1, 2):
        ids = random_ids(1, length)
        state = Session(model)
        with disable_ttt(model):
            off = Session(model).generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(state.generate(ids, max_new_tokens=5, do_sample=False), off)
        with pytest.raises(InPlaceTTTError, match="less than three tokens"):
            Session(model).write_prompt(ids)


def answers(model: PreTrainedModel, prompts: list[Tensor], new: int) -> list[list[int]]:
    """The tokens that lm-eval gets after a padded batch of prompts."""
    words = tiny.word_level([f"w{i}" for i in range(40)])
    lm = PromptLM(model, SimpleNamespace(tokenizer=words), len(prompts))  # type: ignore[arg-type]
    width = max(len(prompt) for prompt in prompts)
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    said = lm._model_generate(ids, width + new, [], attention_mask=mask, do_sample=False)
    return said[:, width:].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_answers_for_lm_eval_of_a_padded_batch_are_those_of_its_rows(name: str) -> None:
    model = prompted(name, cap=None)
    prompts = [random_ids(1, n, seed=n)[0] for n in (31, 44, 40)]
    together = answers(model, prompts, 6)
    for prompt, said in zip(prompts, together, strict=True):
        assert answers(model, [prompt], 6) == [said]
        assert said == Session(model).generate(prompt[None], max_new_tokens=6, do_sample=False)[0].tolist()
    with disable_ttt(model):
        # of random weights gemma3's answers are all alike
        assert (answers(model, prompts, 6) != together) == (name == "llama")


def test_a_session_is_saved_once_its_prompt_is_written(tmp_path: Path) -> None:
    model, prompt = prompted(), random_ids(2, 30)
    state = Session(model)
    state.read(prompt[:, :20])
    with pytest.raises(InPlaceTTTError, match="not written yet"):
        state.save(tmp_path / "early")
    branch = state.fork()
    state.write_prompt(prompt[:, 20:])
    state.save(tmp_path / "session")
    again = Session.load(tmp_path / "session", model)
    again.save(tmp_path / "again")
    assert (tmp_path / "session").read_bytes() == (tmp_path / "again").read_bytes()
    more = {"max_new_tokens": 5, "do_sample": False}
    branch.write_prompt(prompt[:, 20:])
    expected = state.generate(prompt[:, :0], **more)
    assert torch.equal(again.generate(prompt[:, :0], **more), expected) and torch.equal(
        branch.generate(prompt[:, :0], **more), expected
    )


def test_a_session_without_what_was_written_is_refused(tmp_path: Path) -> None:
    model, state = prompted(), Session(prompted())
    state.write_prompt(random_ids(1, 30))
    state.save(tmp_path / "session")
    header, tensors = session_file.read(tmp_path / "session")
    values = {name: getattr(header, name) for name in ("config", "fingerprint")} | {"attention": {}}
    fast = {name: tensor for name, tensor in tensors.items() if ".fast." in name}
    session_file.write(tmp_path / "whole", fast, **values)
    Session.load(tmp_path / "whole", model)
    counts = {name: tensor for name, tensor in fast.items() if name.endswith("counts")}
    session_file.write(tmp_path / "counts", counts, **values)
    with pytest.raises(InPlaceTTTError, match=r"0\.fast\.state is missing"):
        Session.load(tmp_path / "counts", model)
    session_file.write(tmp_path / "open", {**fast, "0.fast.z": torch.zeros(1, 3, 64)}, **values)
    with pytest.raises(InPlaceTTTError, match=r"0\.fast\.z.*, which no session"):
        Session.load(tmp_path / "open", model)


def test_what_cannot_be_is_refused() -> None:
    model, prompt = prompted(window=5), random_ids(1, 30)
    state = Session(model)
    state.read(prompt)
    with pytest.raises(InPlaceTTTError, match="the session has dropped the end of the prompt before them"):
        state.fork().cache.crop(-28)
    gap = state.fork()
    with disable_ttt(model):
        gap.read(prompt[:, :3])
    with pytest.raises(InPlaceTTTError, match="read with TTT off"):
        gap.write_prompt(prompt[:, :4])
    state.write_prompt(prompt[:, :4])
    with pytest.raises(InPlaceTTTError, match="cannot be undone"):
        state.cache.crop(-1)
    known = state.tokens.shape[1]
    with pytest.raises(InPlaceTTTError, match="written already"):
        state.write_prompt(prompt)
    assert state.tokens.shape[1] == known and not any(
        getattr(layer, "record_past", False) for layer in state.cache.layers
    )
    with pytest.raises(InPlaceTTTError, match="lacks prompt_write"):
        Session(converted("llama")).write_prompt(prompt)


def test_a_crop_before_the_write_is_as_if_never_read() -> None:
    model, prompt = prompted(), random_ids(1, 30)
    state = Session(model)
    state.read(torch.cat([prompt[:, :20], random_ids(1, 7, seed=9)], 1))
    state.cache.crop(-7)
    state.tokens = state.tokens[:, :20]
    state.write_prompt(prompt[:, 20:])
    whole = Session(model)
    whole.write_prompt(prompt)
    for index, stream in streams(state.cache).items():
        assert distance(stream.state, streams(whole.cache)[index].state) < 1e-4


def test_beams_carry_what_was_written() -> None:
    model, prompt = prompted(), random_ids(1, 30)
    state = Session(model)
    state.write_prompt(prompt)
    state.cache.batch_repeat_interleave(3)
    written = [stream.state for stream in streams(state.cache).values()]
    state.cache.reorder_cache(torch.tensor([0, 1, 2]))
    assert all(
        stream.state is held for stream, held in zip(streams(state.cache).values(), written, strict=True)
    )
    state.cache.reorder_cache(torch.tensor([2, 0, 1]))
    with torch.no_grad():
        three = model(prompt[:, -1:].expand(3, -1), **{CACHE: state.cache}).logits
    assert distance(three, in_a_session(model, prompt, prompt[:, :0]).expand(3, -1, -1)) < 1e-5


def test_autocast_leaves_the_write_alone() -> None:
    model, state = prompted(), Session(prompted())
    state.read(random_ids(1, 30))
    plain, cast = state.fork(), state.fork()
    for index, layer in fast_weights(model).items():
        streams(plain.cache)[index].write(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            streams(cast.cache)[index].write(layer)
        assert torch.equal(streams(cast.cache)[index].state, streams(plain.cache)[index].state)


def test_bfloat16_and_training_without_a_cache() -> None:
    model, prompt = prompted(dtype=torch.bfloat16), random_ids(1, 30)
    exact = in_a_session(prompted(), prompt, prompt[:, :4])
    assert distance(in_a_session(model, prompt, prompt[:, :4]).float(), exact) < 0.1
    plain = converted("llama", conv="next", target="hidden_states")
    assert torch.equal(logits(prompted(), prompt), logits(plain, prompt)), "without a cache its chunks write"
    expected = torch.nn.functional.cross_entropy(
        logits(plain, prompt)[0, :-1], prompt[0, 1:], reduction="none"
    )
    assert distance(token_losses(prompted(), prompt)[0], expected) < 1e-5, (
        "nor does a text to evaluate have a prompt"
    )

"""Requests with settings of their own: TTT off, a memory to start from, what is kept at the end. `Session`
says what is right."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.llm_engine import LLMEngine

from inplace_ttt import Session, disable_ttt
from inplace_ttt.checkpoint.fingerprint import fingerprint_of
from inplace_ttt.checkpoint.folder_fingerprint import fingerprint_in
from inplace_ttt.serving.request_settings import KNOWN, RequestSettings
from inplace_ttt.session.session import streams
from serving.checkpoints import LIVE, save
from serving.test_tokens import NEW, engine, free_slots, generated, prompts


def params(new: int = NEW, stop: int | None = None, **settings: Any) -> SamplingParams:
    KNOWN.update(settings[name] for name in ("start", "keep") if name in settings)
    given = RequestSettings(**settings, salted=True).extra_args if settings else None
    ends = None if stop is None else [stop]
    return SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, stop_token_ids=ends, extra_args=given
    )


def ask(made: LLMEngine, name: str, prompt: list[int], wanted: SamplingParams, salt: str = "") -> None:
    made.add_request(name, {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}, wanted)


def answers(made: LLMEngine, resets: tuple[int, ...] = ()) -> dict[str, list[int]]:
    """By request; in these steps all that run must begin anew."""
    done, steps = {}, itertools.count()
    while made.has_unfinished_requests():
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in made.step() if out.finished}
        if next(steps) in resets:
            made.reset_prefix_cache(reset_running_requests=True)
    return done


def rpc(made: LLMEngine, name: Any, *args: Any) -> Any:
    (answer,) = made.collective_rpc(name, args=args)
    return answer


def after(model: PreTrainedModel, text: list[int], state: Session | None = None) -> Session:
    """The fast weights after a text, alone."""
    state = state or Session(model)
    state.read(torch.tensor([text]))
    return state.drop_kv_cache()


def continued(model: PreTrainedModel, state: Session, prompt: list[int]) -> list[int]:
    new = state.fork().generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return new[0].tolist()


@pytest.mark.parametrize("caching", [False, True])
def test_ttt_off_beside_ttt_on(caching: bool, tmp_path: Path) -> None:
    model = save(tmp_path / "ttt", "llama", "ridge")
    asked = prompts(100, 200, 300)
    expected = {}
    for number, prompt in enumerate(asked):
        expected[f"on{number}"] = generated(model, prompt)
        with disable_ttt(model):
            expected[f"off{number}"] = generated(model, prompt)
    assert all(expected[f"on{number}"] != expected[f"off{number}"] for number in range(3))
    with engine(tmp_path / "ttt", enable_prefix_caching=caching) as made:
        ask(made, "off0", asked[0], params(off=True), "off")
        assert answers(made) == {"off0": expected["off0"]}, "with no other in the batch"
        for _ in range(2):  # the second time, the prefixes are there
            for number, prompt in enumerate(asked):
                ask(made, f"off{number}", prompt, params(off=True), "off")
                ask(made, f"on{number}", prompt, params())
            assert answers(made) == expected


@pytest.mark.parametrize("preset", LIVE)
def test_a_memory_is_read_and_written_on(preset: str, tmp_path: Path) -> None:
    """Texts whose ends lie anywhere in a chunk; questions of several memories in one batch, under preemption
    and prefix caching."""
    model = save(tmp_path / "ttt", "llama", preset)
    assert fingerprint_in(tmp_path / "ttt") == fingerprint_of(model)
    books = prompts(31, 64, 150, 10, seed=1)
    questions = prompts(20, 70, seed=2)
    states = [after(model, book) for book in books]
    expected = {
        f"{b}/{q}": continued(model, states[b], question)
        for b in range(4)
        for q, question in enumerate(questions)
    }
    expected |= {f"none/{q}": generated(model, question) for q, question in enumerate(questions)}
    assert len({tuple(expected[f"{b}/1"]) for b in (0, 1, 2, 3, "none")}) == 5, (
        "each memory says something else"
    )
    settings = {
        "max_num_batched_tokens": 128,
        "max_num_seqs": 5,
        "num_gpu_blocks_override": 40,
    }
    with engine(tmp_path / "ttt", enable_prefix_caching=True, **settings) as made:
        for b, book in enumerate(books):
            ask(made, f"read{b}", book, params(1, keep=f"k{b}"), f"read{b}")
        answers(made)
        for b, book in enumerate(books):
            assert rpc(made, "ttt_keep", f"s{b}", f"k{b}", len(book))["tokens"] == len(book)
        for turn in range(2):
            for b in (0, 1, 2, 3, "none"):
                for q, question in enumerate(questions):
                    wanted = params() if b == "none" else params(start=f"s{b}", keep=f"again{b}{q}")
                    ask(made, f"{b}/{q}", question, wanted, "" if b == "none" else f"s{b}")
            assert answers(made, resets=(5, 17, 40) if turn == 0 else ()) == expected
        # what a question and its answer have written is the memory's next state, but for the last token,
        # which nobody has read
        read = len(books[2]) + len(questions[0]) + NEW - 1
        assert rpc(made, "ttt_keep", "next", "again20", read)["tokens"] == read
        state = after(model, [*questions[0], *expected["2/0"][:-1]], states[2].fork())
        ask(made, "on", questions[1], params(start="next"), "next")
        assert answers(made)["on"] == continued(model, state, questions[1])
        # and a file of it is a session's, both ways
        rpc(made, "ttt_save", "next", str(tmp_path / "next.state"))
        assert continued(model, Session.load(tmp_path / "next.state", model), questions[1]) == continued(
            model, state, questions[1]
        )
        states[1].save(tmp_path / "one.state")
        assert rpc(made, "ttt_load", "one", str(tmp_path / "one.state"))["tokens"] == len(books[1])
        ask(made, "one", questions[1], params(start="one"), "one")
        assert answers(made)["one"] == expected["1/1"]
        free, slots = free_slots(made)
        assert free == slots


@pytest.mark.parametrize("later", [False, True], ids=["kept at once", "kept after other requests"])
@pytest.mark.parametrize("scheduling", [False, True], ids=["step by step", "asynchronous"])
def test_an_answer_that_ends_early(
    scheduling: bool, later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With asynchronous scheduling a worker reads a token after the last one, and this may complete a chunk.
    A memory holds what the answer says."""
    settings_of_cpus = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: VllmConfig) -> None:
        settings_of_cpus(vllm_config)  # turns asynchronous scheduling off
        vllm_config.scheduler_config.async_scheduling = scheduling

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_update_config))
    model = save(tmp_path / "ttt", "llama", "ridge")
    texts, question = prompts(*range(24, 36), seed=7), prompts(40, seed=8)[0]
    said = [generated(model, text) for text in texts]
    ends = [answer.index(answer[4]) + 1 for answer in said]
    with engine(tmp_path / "ttt", enable_prefix_caching=False, max_num_seqs=12) as made:
        for number, text in enumerate(texts):
            wanted = params(stop=said[number][4], keep=f"k{number}")
            ask(made, str(number), text, wanted, f"t{number}")
        assert answers(made) == {str(n): said[n][:end] for n, end in enumerate(ends)}
        if later:
            ask(made, "next", question, params())
            answers(made)
        batch, over = rpc(made, lambda worker: worker.ttt_batch), 0
        for number, (text, end) in enumerate(zip(texts, ends, strict=True)):
            read, keep = len(text) + end - 1, f"k{number}"
            held = batch.left.get(keep)
            there = [row.tokens for row in batch.rows.values() if row.settings.keep == keep]
            over += (held.whole.tokens if held else there[0]) > read
            assert rpc(made, "ttt_keep", f"s{number}", keep, read)["tokens"] == read
            ask(made, keep, question, params(start=f"s{number}"), keep)
        assert (over > 6) == scheduling
        asked = answers(made)
        for number, (text, end) in enumerate(zip(texts, ends, strict=True)):
            state = after(model, [*text, *said[number][: end - 1]])
            assert asked[f"k{number}"] == continued(model, state, question)


@pytest.mark.parametrize("preset", LIVE)
def test_two_ranks_are_one(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism: what is generated, and what a memory's file holds."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = save(tmp_path / "ttt", "llama", preset)
    (book, *asked), question = prompts(150, 31, 70, 200), prompts(40, seed=5)[0]
    state = after(model, book)
    state.save(tmp_path / "in.state")
    with engine(tmp_path / "ttt", tensor_parallel_size=2, distributed_executor_backend="mp") as made:
        for number, prompt in enumerate(asked):
            ask(made, str(number), prompt, params())
        assert answers(made) == {str(number): generated(model, prompt) for number, prompt in enumerate(asked)}
        assert [
            found["tokens"]
            for found in made.collective_rpc("ttt_load", args=("s", str(tmp_path / "in.state")))
        ] == [len(book)] * 2
        ask(made, "asked", question, params(start="s", keep="k"), "s")
        assert answers(made)["asked"] == continued(model, state, question)
        made.collective_rpc("ttt_keep", args=("next", "k", len(book) + len(question) + NEW - 1))
        made.collective_rpc("ttt_save", args=("next", str(tmp_path / "out.state")))
    later = after(model, [*question, *continued(model, state, question)[:-1]], state.fork())
    found = Session.load(tmp_path / "out.state", model)
    for index, stream in streams(later.cache).items():
        mine = streams(found.cache)[index]
        assert mine.tokens == stream.tokens and torch.allclose(
            mine.state, stream.state, rtol=1e-3, atol=1e-3 * float(stream.state.abs().max())
        )


def test_what_is_let_go_of_leaves_nothing(tmp_path: Path) -> None:
    """Requests that are aborted anywhere, and forgotten before or after."""
    save(tmp_path / "ttt", "llama", "paper")
    with engine(tmp_path / "ttt") as made:
        for number, prompt in enumerate(prompts(40, 80, 120)):
            ask(made, str(number), prompt, params(keep=f"k{number}"), "x")
        for number in range(3):
            for _ in range(number):
                made.step()
            if number == 1:
                rpc(made, "ttt_forget", "k1")
            made.abort_request([str(number)])
            if number != 1:
                rpc(made, "ttt_forget", f"k{number}")
        ask(made, "last", prompts(30)[0], params())
        answers(made)
        batch = rpc(made, lambda worker: worker.ttt_batch)
        assert (
            not batch.left
            and not batch.snapshots
            and not any(row.settings.keep for row in batch.rows.values())
        )
        assert "error" in rpc(made, "ttt_keep", "s", "k0", 1)


def test_settings_that_are_none(tmp_path: Path) -> None:
    save(tmp_path / "ttt", "llama", "paper")
    with engine(tmp_path / "ttt") as made:
        for given in (
            "{",
            '{"of": true}',
            '{"off": true}',
            '{"off": 3, "salted": true}',
            '{"start": "x", "salted": true}',
        ):
            with pytest.raises(VLLMValidationError, match=r"inplace_ttt .*extra_args"):
                ask(made, "bad", [5, 6], SamplingParams(max_tokens=2, extra_args={"inplace_ttt": given}))

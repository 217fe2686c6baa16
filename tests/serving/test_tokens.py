"""What vLLM generates is what `generate` does, token for token, however its scheduler cuts and mixes the
requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

import inplace_ttt
from inplace_ttt import UpdateClip, disable_ttt
from inplace_ttt.errors import InPlaceTTTError
from serving.checkpoints import FAMILIES, LIVE, save

NEW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLMEngine]:
    given = {
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    made = LLMEngine.from_engine_args(EngineArgs(str(path), **{**given, **settings}))
    try:
        yield made
    finally:
        made.engine_core.shutdown()


def scheduler(made: LLMEngine) -> Any:
    return made.engine_core.engine_core.scheduler


def free_slots(made: LLMEngine) -> tuple[int, int]:
    """Slots that nobody has, and all."""
    (manager,) = {
        m
        for m in scheduler(made).kv_cache_manager.coordinator.single_type_managers
        if type(m).__name__ == "SlotManager"
    }
    return manager.block_pool.get_num_free_blocks(), manager.kv_cache_spec.slots - 1


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 500, (length,), generator=generator).tolist() for length in lengths]


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """By transformers, one prompt alone."""
    ids = torch.tensor([prompt])
    new = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return new[0, len(prompt) :].tolist()


def served(
    made: LLMEngine, asked: list[list[int]], params: SamplingParams = GREEDY, name: str = ""
) -> dict[int, list[int]]:
    """By vLLM, all prompts at once."""
    for number, prompt in enumerate(asked):
        made.add_request(f"{name}{number}", {"prompt_token_ids": prompt}, params)
    done = {}
    while made.has_unfinished_requests():
        for output in made.step():
            if output.finished:
                done[int(output.request_id.removeprefix(name))] = list(output.outputs[0].token_ids)
    return done


@pytest.mark.parametrize("preset", LIVE)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_preset(family: str, preset: str, tmp_path: Path) -> None:
    model = save(tmp_path / "ttt", family, preset)
    asked = prompts(1, 31, 32, 33, 64, 70, 200)
    expected = {number: generated(model, prompt) for number, prompt in enumerate(asked)}
    with disable_ttt(model):
        assert sum(generated(model, prompt) == expected[number] for number, prompt in enumerate(asked)) < 6, (
            "writes change what is said"
        )
    with engine(tmp_path / "ttt") as made:
        assert served(made, asked) == expected
        free, slots = free_slots(made)
        assert free == slots


@pytest.mark.parametrize(
    "clip",
    [UpdateClip(0.05, relative=True), UpdateClip(2.0, relative=False, mode="inference")],
    ids=["relative", "absolute"],
)
def test_a_clip_that_bites(clip: UpdateClip, tmp_path: Path) -> None:
    asked, said = prompts(100, 200), []
    for name, bound in (("free", None), ("clipped", clip)):
        model = save(tmp_path / name, "qwen3", "paper", clip=bound)
        with engine(tmp_path / name) as made:
            said.append(served(made, asked))
        assert said[-1] == {number: generated(model, prompt) for number, prompt in enumerate(asked)}
    assert said[0] != said[1]


def test_mixed_requests(tmp_path: Path) -> None:
    """64 of 16 to 4,000 tokens that come at any time: split prefills, forced preemption, prefixes that come
    again, and aborts."""
    model = save(tmp_path / "ttt", "llama", "ridge")
    generator = torch.Generator().manual_seed(3)
    lengths = (16 * (250 ** torch.rand(64, generator=generator))).long().tolist()
    asked = prompts(*lengths, seed=4)
    for number in range(8, 64, 4):  # a fourth go on from a prompt that was there
        asked[number] = asked[number - 8][: len(asked[number - 8]) * 2 // 3] + asked[number][:100]
    expected = [generated(model, prompt[-4000:]) for prompt in asked]
    asked = [prompt[-4000:] for prompt in asked]
    preempted, cached, done = 0, 0, {}
    settings = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 12,
        "num_gpu_blocks_override": 60,
    }
    with engine(tmp_path / "ttt", enable_prefix_caching=True, **settings) as made:
        waiting, aborted = list(range(64)), set()
        while waiting or made.has_unfinished_requests():
            for _ in range(int(torch.randint(0, 4, (1,), generator=generator))):
                if waiting:
                    number = waiting.pop(0)
                    made.add_request(str(number), {"prompt_token_ids": asked[number]}, GREEDY)
                    made.add_request(f"gone{number}", {"prompt_token_ids": asked[number]}, GREEDY)
            running = scheduler(made).running
            if torch.rand(1, generator=generator) < 0.02:
                preempted += len(running)
                made.reset_prefix_cache(reset_running_requests=True)
            for request in [r.request_id for r in running if r.request_id.startswith("gone")][:1]:
                if torch.rand(1, generator=generator) < 0.3:
                    made.abort_request([request.rsplit("-", 1)[0]])
                    aborted.add(request)
            for output in made.step():
                if output.finished:
                    cached += output.num_cached_tokens or 0
                    done[output.request_id] = list(output.outputs[0].token_ids)
        wrong = [
            name
            for name, tokens in done.items()
            if tokens[:NEW] != expected[int(name.removeprefix("gone"))][: len(tokens)]
        ]
        assert wrong == []
        assert all(len(done[str(number)]) == NEW for number in range(64))
        assert preempted > 0 and cached > 0 and aborted
        free, slots = free_slots(made)
        assert free == slots


def test_few_slots(tmp_path: Path) -> None:
    """Who finds none free waits; what another left in a slot is read by nobody."""
    model = save(tmp_path / "ttt", "llama", "ridge")
    asked = prompts(*range(40, 200, 20))
    expected = {number: generated(model, prompt) for number, prompt in enumerate(asked)}
    with engine(
        tmp_path / "ttt", enable_prefix_caching=True, additional_config={"inplace_ttt_slots": 3}
    ) as made:
        for name in ("first", "again"):
            assert served(made, asked, name=name) == expected
            assert free_slots(made) == (3, 3)
    too_few = {"enable_prefix_caching": True, "additional_config": {"inplace_ttt_slots": 1}}
    with (
        pytest.raises(InPlaceTTTError, match="must be a whole number of at least 2, got 1"),
        engine(tmp_path / "ttt", **too_few),
    ):
        pass


def test_what_is_not_served_is_one_sentence(tmp_path: Path) -> None:
    save(tmp_path / "ttt", "llama", "paper", update_on_decode=False)
    with (
        pytest.raises(InPlaceTTTError, match="update_on_decode off cannot be served with fast weights yet"),
        engine(tmp_path / "ttt"),
    ):
        pass


def test_the_saved_model_is_the_served_one(tmp_path: Path) -> None:
    """What `load` reads, and half precision."""
    save(tmp_path / "ttt", "llama", "reference")
    model = inplace_ttt.load(tmp_path / "ttt", dtype=torch.bfloat16)
    asked = prompts(40, 100)
    with engine(tmp_path / "ttt", dtype="bfloat16") as made:
        assert [served(made, asked)[number][:4] for number in range(2)] == [
            generated(model, prompt)[:4] for prompt in asked
        ]

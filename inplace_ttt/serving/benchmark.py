"""Throughput and waiting times of concurrent requests.

A converted model in vLLM is compared with its base in vLLM, and with `generate`, which answers one request
after the other.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from ..errors import InPlaceTTTError

_ALONE = 2
"""Number of requests that `generate` answers in a round: the longest and one of medium length.

It answers one request at a time, so the requests that wait do not change its time per request.
"""


Measured = dict[str, float]
"""Figures of one contender in one turn, by name."""

Turn = tuple[int, int]
"""The number of a round, and the number of its requests."""


@dataclass(frozen=True)
class Load:
    """The requests of a benchmark.

    Attributes:
        requests: the numbers of requests at once, each measured.
        prompt: tokens in the longest prompt; the shortest has a sixteenth of them.
        new: tokens that each request generates.
        dtype: the dtype of all models.
        rounds: the number of measured rounds, after one to warm up.
    """

    requests: tuple[int, ...]
    prompt: int
    new: int
    dtype: str
    rounds: int

    def prompts(self, turn: Turn, vocabulary: int) -> list[list[int]]:
        """Returns the prompts of a turn, as token ids.

        All are drawn anew, so that no prefix repeats. Their lengths are evenly spaced on a logarithmic scale.
        """
        drawn, (_, requests) = random.Random(str(turn)), turn
        lengths = [round(self.prompt * 16 ** -(i / max(requests - 1, 1))) for i in range(requests)]
        return [[drawn.randrange(3, vocabulary) for _ in range(max(length, 1))] for length in lengths]


def compare(converted: str, base: str, load: Load) -> dict[str, Any]:
    """Measures rounds in which each contender answers the same requests, one contender after the other.

    Args:
        converted: the folder of the converted model.
        base: the folder of its base.
        load: the requests.

    Returns:
        For each number of requests: each contender's tokens per second, seconds per request, seconds to the
        first token and seconds per further token, and the ratios of the converted model's tokens per second
        to those of the other two. Each has median, minimum and maximum over rounds. Ratios are computed
        within rounds. The time to the first token is not measured for `generate`.

    Raises:
        InPlaceTTTError: if a contender's process ended.
    """
    kinds = {"base": (_vllm, base), "converted": (_vllm, converted), "generate": (_generate, converted)}
    turns = [(number, requests) for number in range(load.rounds + 1) for requests in load.requests]
    seen: dict[int, list[dict[str, Measured]]] = {requests: [] for requests in load.requests}
    with _contenders(kinds, load) as ask:
        for turn in tqdm(turns, desc="turns, the first to warm up", file=sys.stderr, disable=None):
            found = {kind: ask(kind, turn) for kind in kinds}
            if turn[0]:
                seen[turn[1]].append(found)
    return {
        "load": vars(load),
        "by_requests": [_summary(requests, rounds) for requests, rounds in seen.items()],
    }


def _summary(requests: int, rounds: list[dict[str, Measured]]) -> dict[str, Any]:
    """Returns the medians and ranges of the rounds of one number of requests."""
    figures = {
        name: {
            kind: _spread([found[kind][name] for found in rounds])
            for kind, known in rounds[0].items()
            if name in known
        }
        for name in rounds[0]["base"]
    }
    rates = [{kind: known["tokens_per_second"] for kind, known in found.items()} for found in rounds]
    return {
        "requests": requests,
        **figures,
        "of_base": _spread([rate["converted"] / rate["base"] for rate in rates]),
        "of_generate": _spread([rate["converted"] / rate["generate"] for rate in rates]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@contextmanager
def _contenders(
    kinds: dict[str, tuple[Callable[..., None], str]], load: Load
) -> Iterator[Callable[[str, Turn], Measured]]:
    """Starts each contender in its own process, and yields a function that asks one for a round."""
    context, pipes, processes = get_context("spawn"), {}, []
    try:
        for kind, (serve, path) in kinds.items():
            pipes[kind], far = context.Pipe()
            processes.append(context.Process(target=serve, args=(far, path, load), daemon=False))
            processes[-1].start()
            far.close()
            _receive(pipes[kind], kind)

        def ask(kind: str, turn: Turn) -> Measured:
            with suppress(OSError):  # its process has ended, which `_receive` reports
                pipes[kind].send(turn)
            return _receive(pipes[kind], kind)

        yield ask
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join(60)
            process.kill()


def _receive(pipe: Connection, kind: str) -> Measured:
    try:
        found = pipe.recv()
    except (EOFError, OSError):
        raise InPlaceTTTError(f"the process of {kind} has ended; its output is above.") from None
    assert isinstance(found, dict)
    return found


def _turns(pipe: Connection) -> Iterator[Turn]:
    """Yields the turns that are asked for, until the other end of the pipe closes."""
    pipe.send({})
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _vllm(pipe: Connection, path: str, load: Load) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import EngineArgs, SamplingParams

    from .vllm_names import LLMEngine

    settings = EngineArgs(
        path,
        dtype=load.dtype,
        max_model_len=load.prompt + load.new,
        max_num_seqs=max(load.requests),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_engine_args(settings)
    params = SamplingParams(temperature=0, max_tokens=load.new, ignore_eos=True, detokenize=False)
    vocabulary = engine.model_config.get_vocab_size()
    for turn in _turns(pipe):
        prompts = load.prompts(turn, vocabulary)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{turn}-{index}", {"prompt_token_ids": prompt}, params)
        firsts, ends = dict[str, float](), list[float]()
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = time.perf_counter() - began
                firsts.setdefault(output.request_id, now)
                if output.finished:
                    ends.append(now)
        waited = statistics.median(ends), statistics.median(firsts.values())
        pipe.send(
            {
                "tokens_per_second": len(prompts) * load.new / ends[-1],
                "seconds_per_request": waited[0],
                "seconds_to_first_token": waited[1],
                "seconds_per_token": (waited[0] - waited[1]) / max(load.new - 1, 1),
            }
        )


def _generate(pipe: Connection, path: str, load: Load) -> None:
    import torch

    from ..checkpoint.opened import load as load_converted

    model = load_converted(path, dtype=getattr(torch, load.dtype))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for turn in _turns(pipe):
        prompts = load.prompts(turn, model.config.get_text_config().vocab_size)
        took = []
        for prompt in prompts[:: max(len(prompts) // _ALONE, 1)][:_ALONE]:
            ids, began = torch.tensor([prompt]), time.perf_counter()
            model.generate(
                ids,
                max_new_tokens=load.new,
                min_new_tokens=load.new,
                attention_mask=torch.ones_like(ids),
                **settings,
            )
            took.append(time.perf_counter() - began)
        waited = statistics.median(took)
        pipe.send({"tokens_per_second": len(took) * load.new / sum(took), "seconds_per_request": waited})

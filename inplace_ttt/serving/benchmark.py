"""Throughput of many requests at once.

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


@dataclass(frozen=True)
class Load:
    """The requests of a benchmark.

    Attributes:
        requests: the number of requests at once.
        prompt: tokens in the longest prompt; the shortest has a sixteenth of them.
        new: tokens that each request generates.
        dtype: the dtype of all models.
        rounds: the number of measured rounds, after one to warm up.
    """

    requests: int
    prompt: int
    new: int
    dtype: str
    rounds: int

    def prompts(self, number: int, vocabulary: int) -> list[list[int]]:
        """Returns the prompts of a round, as token ids.

        All are drawn anew, so that no prefix repeats. Their lengths are evenly spaced on a logarithmic scale.
        """
        drawn = random.Random(number)
        lengths = [round(self.prompt * 16 ** -(i / max(self.requests - 1, 1))) for i in range(self.requests)]
        return [[drawn.randrange(3, vocabulary) for _ in range(max(length, 1))] for length in lengths]


def compare(converted: str, base: str, load: Load) -> dict[str, Any]:
    """Measures rounds in which each contender answers the same requests, one contender after the other.

    Args:
        converted: the folder of the converted model.
        base: the folder of its base.
        load: the requests.

    Returns:
        Tokens per second and seconds per request of each contender, and the ratios of the converted model's
        tokens per second to those of the other two. Each has median, minimum and maximum over rounds. Ratios
        are computed within rounds.

    Raises:
        InPlaceTTTError: if a contender's process ended.
    """
    kinds = {"base": (_vllm, base), "converted": (_vllm, converted), "generate": (_generate, converted)}
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with _contenders(kinds, load) as ask:
        for number in tqdm(
            range(load.rounds + 1), desc="rounds, one to warm up", file=sys.stderr, disable=None
        ):
            for kind in kinds:
                found = ask(kind, number)
                if number:
                    seen[kind].append(found)
    rates = {kind: [found["tokens_per_second"] for found in rounds] for kind, rounds in seen.items()}
    waits = {kind: [found["seconds"] for found in rounds] for kind, rounds in seen.items()}
    return {
        "load": vars(load),
        "tokens_per_second": {kind: _spread(values) for kind, values in rates.items()},
        "seconds_a_request": {kind: _spread(values) for kind, values in waits.items()},
        "of_base": _spread(
            [mine / others for mine, others in zip(rates["converted"], rates["base"], strict=True)]
        ),
        "of_generate": _spread(
            [mine / others for mine, others in zip(rates["converted"], rates["generate"], strict=True)]
        ),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@contextmanager
def _contenders(
    kinds: dict[str, tuple[Callable[..., None], str]], load: Load
) -> Iterator[Callable[[str, int], dict[str, float]]]:
    """Starts each contender in its own process, and yields a function that asks one for a round."""
    context, pipes, processes = get_context("spawn"), {}, []
    try:
        for kind, (serve, path) in kinds.items():
            pipes[kind], far = context.Pipe()
            processes.append(context.Process(target=serve, args=(far, path, load), daemon=False))
            processes[-1].start()
            far.close()
            _receive(pipes[kind], kind)

        def ask(kind: str, number: int) -> dict[str, float]:
            with suppress(OSError):  # its process has ended, which `_receive` reports
                pipes[kind].send(number)
            return _receive(pipes[kind], kind)

        yield ask
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join(60)
            process.kill()


def _receive(pipe: Connection, kind: str) -> dict[str, float]:
    try:
        found = pipe.recv()
    except (EOFError, OSError):
        raise InPlaceTTTError(f"the process of {kind} has ended; its output is above.") from None
    assert isinstance(found, dict)
    return found


def _rounds(pipe: Connection) -> Iterator[int]:
    """Yields the numbers of the rounds that are asked for, until the other end of the pipe closes."""
    pipe.send({})
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _vllm(pipe: Connection, path: str, load: Load) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    length = load.prompt + load.new
    settings = EngineArgs(
        path,
        dtype=load.dtype,
        max_model_len=length,
        max_num_seqs=load.requests,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_engine_args(settings)
    params = SamplingParams(temperature=0, max_tokens=load.new, ignore_eos=True, detokenize=False)
    vocabulary = engine.model_config.get_vocab_size()
    for number in _rounds(pipe):
        prompts = load.prompts(number, vocabulary)
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, params)
        ends = []
        while engine.has_unfinished_requests():
            ends += [time.perf_counter() - began for output in engine.step() if output.finished]
        pipe.send(
            {"tokens_per_second": len(prompts) * load.new / ends[-1], "seconds": statistics.median(ends)}
        )


def _generate(pipe: Connection, path: str, load: Load) -> None:
    import torch

    from ..checkpoint.opened import load as load_converted

    model = load_converted(path, dtype=getattr(torch, load.dtype))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for number in _rounds(pipe):
        prompts = load.prompts(number, model.config.get_text_config().vocab_size)
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
        pipe.send({"tokens_per_second": len(took) * load.new / sum(took), "seconds": statistics.median(took)})

"""Counts the tokens that a request has read, by its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from vllm import SamplingParams

from .request_settings import RequestSettings
from .vllm_names import RequestOutputKind
from .worker_calls import Engine


class ReadCounts:
    """Counts the tokens of requests whose state is kept.

    vLLM schedules a step before it knows that the last one ended a request, so a worker may have read a token
    more than the answer has. The answer decides: its last token is not read.

    Args:
        engine: the engine, whose `generate` is replaced by one that counts.
    """

    def __init__(self, engine: Engine) -> None:
        self._counts: dict[str, int] = {}
        self._generate = engine.generate
        engine.generate = self._counted

    def take(self, keep: str) -> int:
        """Returns the number of tokens that the request with this `keep` has read, and forgets it."""
        return self._counts.pop(keep, 0)

    def _counted(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        answers = self._generate(prompt, sampling_params, *args, **kwargs)
        keep = RequestSettings.of(sampling_params).keep
        if keep is None:
            return answers
        return self._counting(answers, keep, sampling_params.output_kind == RequestOutputKind.DELTA)

    async def _counting(
        self, answers: AsyncGenerator[Any, None], keep: str, in_parts: bool
    ) -> AsyncGenerator[Any, None]:
        said = 0
        async with aclosing(answers):  # vLLM aborts a request when its answers are closed
            async for output in answers:
                new = len(output.outputs[0].token_ids)
                said = said + new if in_parts else new
                self._counts[keep] = len(output.prompt_token_ids) + said - 1
                yield output

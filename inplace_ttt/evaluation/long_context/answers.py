"""Answers the tasks in batches, and keeps each result as soon as it is complete.

A result is {asked, scores, tokens, answers, options, guesses, predictions}.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from ...families import CACHE
from ...files.results import Results
from ...session.prompt import write_prompt
from ...surgery import config_of, is_converted
from .prompt import Prompter, Sample, Task, check, samples

_PREFILL = 1024
"""Largest number of prompt tokens per forward pass, so that a long prompt fits on the device."""


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark run.

    Attributes:
        tasks: the tasks.
        lengths: lengths of prompt and answer, in tokens.
        count: samples per task and length.
        seed: seed of the samples.
        batch_size: prompts per batch.
    """

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int
    batch_size: int

    def cells(self) -> Iterator[tuple[Task, int]]:
        """Yields every task at every length."""
        for length, task in itertools.product(self.lengths, self.tasks):
            yield task, length


@dataclass(frozen=True)
class Variant:
    """One column of the table.

    Attributes:
        name: "on", "off" or "base".
        model: the model.
        fingerprint: fingerprint of its weights.
        config: the config of its writes, or None.
        switch: returns a context in which the model is this variant.
    """

    name: str
    model: PreTrainedModel
    fingerprint: str
    config: dict[str, Any] | None
    switch: Callable[[], AbstractContextManager[Any]]


def asked(
    task: Task, length: int, settings: Settings, variant: Variant, material: Any, prompter: Prompter
) -> dict[str, Any]:
    """Returns everything that a result depends on, apart from rounding."""
    return {
        "task": task.name,
        "length": length,
        "samples": settings.count,
        "seed": settings.seed,
        "chat": prompter.chat,
        "tokenizer": prompter.digest,
        "ends": _ends(variant.model, prompter.tokenizer),
        "model": variant.fingerprint,
        "dtype": str(variant.model.dtype),
        "config": variant.config,
        **task.made_of(material),
    }


def run_cells(
    settings: Settings,
    variants: Sequence[Variant],
    material: Any,
    prompter: Prompter,
    results: Results,
    progress: Callable[[str, int], None] = lambda what, samples: None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Computes the missing results, cell by cell, with one batch of samples in memory at a time.

    Args:
        settings: settings of the run.
        variants: columns of the table.
        material: texts that samples are made of.
        prompter: turns drafts into token ids.
        results: receives the results.
        progress: called with a result's name and the number of samples answered, or found.
        ready: called once every task is known to be possible.

    Raises:
        InPlaceTTTError: before `ready` is called, if a task is impossible.
    """
    questions = [
        (
            task,
            length,
            variant,
            f"{variant.name}-{task.name}-{length}",
            asked(task, length, settings, variant, material, prompter),
        )
        for task, length in settings.cells()
        for variant in variants
    ]
    missing = [question for question in questions if results.get(question[3], asked=question[4]) is None]
    for task, length in dict.fromkeys(question[:2] for question in missing):
        progress(f"{task.name}-{length}", 0)
        check(task, length, settings.count, settings.seed, material, prompter)
    ready()
    progress("", settings.count * (len(questions) - len(missing)))
    for (task, length), group in itertools.groupby(missing, key=lambda question: question[:2]):
        cells = list(group)
        answers: list[tuple[str, ...]] = []
        options: list[tuple[str, ...]] = []
        guesses: list[tuple[str, ...]] = []
        tokens: list[int] = []
        predictions: dict[str, list[str]] = {name: [] for _, _, _, name, _ in cells}
        made = samples(task, length, settings.count, settings.seed, material, prompter)
        while batch := list(itertools.islice(made, settings.batch_size)):
            answers += [sample.draft.answers for sample in batch]
            options += [sample.draft.options for sample in batch]
            guesses += [sample.draft.guesses for sample in batch]
            tokens += [len(sample.ids) for sample in batch]
            for _, _, variant, name, _ in cells:
                progress(name, 0)
                with variant.switch():
                    predictions[name] += answer(variant.model, prompter.tokenizer, batch, task.budget)
                progress(name, len(batch))
        for _, _, _, name, wanted in cells:
            scores = [task.score(*given) for given in zip(predictions[name], answers, options, strict=True)]
            result = {"asked": wanted, "scores": scores, "tokens": tokens, "answers": answers}
            result |= {"options": options, "guesses": guesses} if any(options) else {}
            results.put(name, {**result, "predictions": predictions[name]})


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: Any, batch: Sequence[Sample], budget: int) -> list[str]:
    """Generates greedy answers to prompts of similar length.

    Prompts are padded on the left, and read in pieces.

    Args:
        model: a converted model or its base.
        tokenizer: the model's tokenizer.
        batch: the samples.
        budget: largest number of tokens of an answer.
    """
    width = max(len(sample.ids) for sample in batch)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    ids = torch.tensor(
        [[pad] * (width - len(sample.ids)) + sample.ids for sample in batch], device=model.device
    )
    mask = torch.tensor(
        [[0] * (width - len(sample.ids)) + [1] * len(sample.ids) for sample in batch], device=model.device
    )
    own = model.generation_config
    # with `prompt_write`, generate reads one token, which needs no pieces
    writes = is_converted(model) and config_of(model).prompt_write is not None
    config = GenerationConfig(
        max_new_tokens=budget,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=_ends(model, tokenizer),
        pad_token_id=pad,
        prefill_chunk_size=None
        if writes
        else -(
            -width // -(-width // _PREFILL)
        ),  # equal pieces: a last piece of one token would count as generated
    )
    # a benchmark leaves out a checkpoint's settings for chatting (penalties, temperatures)
    kept, model.generation_config = own, config
    try:
        cache = {CACHE: _written(model, ids, mask)} if writes else {}
        new = model.generate(ids, attention_mask=mask, **cache)[:, width:]
    finally:
        model.generation_config = kept
    return [tokenizer.decode(row, skip_special_tokens=True) for row in new]


def _ends(model: PreTrainedModel, tokenizer: Any) -> int | list[int] | None:
    """Returns the token ids that end an answer."""
    own = model.generation_config
    return tokenizer.eos_token_id if own is None or own.eos_token_id is None else own.eos_token_id


def _written(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> DynamicCache:
    """Returns a cache that has read the prompts up to their last token, with the prompts written.

    With TTT off, nothing is written.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    cache.activate_past_recording()
    model.generate(ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=1)
    write_prompt(model, cache)
    return cache

"""Answers of a model to the tasks, batched; each result is kept as it comes.

One is {asked, scores, tokens, answers, options, guesses, predictions}.
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
from ...session.session import write_prompt
from ...surgery import config_of, is_converted
from .prompt import Prompter, Sample, Task, check, samples

_PREFILL = 1024
"""Tokens read at once, so that a long prompt fits on the device."""


@dataclass(frozen=True)
class Settings:
    """What samples are made from and how they are put to a model."""

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int
    batch_size: int

    def cells(self) -> Iterator[tuple[Task, int]]:
        for length, task in itertools.product(self.lengths, self.tasks):
            yield task, length


@dataclass(frozen=True)
class Variant:
    """One column of the table: a model, and what switches it to this variant."""

    name: str
    model: PreTrainedModel
    fingerprint: str
    config: dict[str, Any] | None  # of the writes, where there are any
    switch: Callable[[], AbstractContextManager[Any]]


def asked(
    task: Task, length: int, settings: Settings, variant: Variant, material: Any, prompter: Prompter
) -> dict[str, Any]:
    """What a result depends on, up to rounding."""
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
    """Fill in the results that are missing, cell by cell, one batch of samples in memory at a time.

    progress: is told of samples as they are answered, or found. ready: is called once every task is known to
        be possible. Raises
    InPlaceTTTError before that for a task that is not.
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
    """Greedy answers of up to `budget` tokens to prompts of about one length, padded at the left, read in
    pieces."""
    width = max(len(sample.ids) for sample in batch)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    ids = torch.tensor(
        [[pad] * (width - len(sample.ids)) + sample.ids for sample in batch], device=model.device
    )
    mask = torch.tensor(
        [[0] * (width - len(sample.ids)) + [1] * len(sample.ids) for sample in batch], device=model.device
    )
    own = model.generation_config
    # then one token is left for generate, and no pieces
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
        else -(-width // -(-width // _PREFILL)),  # even: a last piece of one token would count as generated
    )
    # what a checkpoint sets for chatting (penalties, temperatures) is no part of a benchmark
    kept, model.generation_config = own, config
    try:
        cache = {CACHE: _written(model, ids, mask)} if writes else {}
        new = model.generate(ids, attention_mask=mask, **cache)[:, width:]
    finally:
        model.generation_config = kept
    return [tokenizer.decode(row, skip_special_tokens=True) for row in new]


def _ends(model: PreTrainedModel, tokenizer: Any) -> int | list[int] | None:
    """Token ids that end an answer."""
    own = model.generation_config
    return tokenizer.eos_token_id if own is None or own.eos_token_id is None else own.eos_token_id


def _written(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> DynamicCache:
    """A cache that has read prompts but for their last token, and holds what was written of them; with TTT
    off, nothing."""
    cache = DynamicCache(config=model.config.get_text_config())
    cache.activate_past_recording()
    model.generate(ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=1)
    write_prompt(model, cache)
    return cache

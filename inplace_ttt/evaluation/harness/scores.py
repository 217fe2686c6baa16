"""Scores models on tasks of lm-eval, and keeps each result as soon as it is complete.

A result is {asked, metrics, samples}. Each metric is {value, scores, higher_is_better}: lm-eval's own value,
and the scores of all samples if the value is their mean. Each sample has the model's prediction. Samples of
RULER and BABILong also have {tokens, answers, options, guesses}.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from math import isclose
from typing import Any

import datasets
import lm_eval
import torch
from lm_eval.api.task import Task as HarnessTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from ...checkpoint.fingerprint import fingerprint_of
from ...errors import InPlaceTTTError, reported, shown
from ...files.results import Results
from ...surgery import config_of
from ..baseline_losses import digest_without_writes
from ..prompt import Prompter, Task, check
from .generated import GeneratedTask
from .names import FAMILIES, Texts
from .prompt_lm import PromptLM, ends_of

_NAME = re.compile(r"[A-Za-z][\w.+-]*")
_FILES = (".yaml", ".yml")


@dataclass(frozen=True)
class Cell:
    """One task, at one length if it is of this package.

    Attributes:
        task: name of the task.
        length: length of prompt and answer in tokens; None for a task of lm-eval.
        count: number of samples.
        asked: everything that the samples depend on.
        make: returns the task for lm-eval.
        check: raises InPlaceTTTError if the samples cannot be made.
        likelihoods: the task asks for likelihoods, not for answers.
    """

    task: str
    length: int | None
    count: int
    asked: dict[str, Any]
    make: Callable[[], HarnessTask]
    check: Callable[[], None] = lambda: None
    likelihoods: bool = False

    @property
    def name(self) -> str:
        """Name of the cell, and of its files."""
        return self.task.replace("/", "_") if self.length is None else f"{self.task}-{self.length}"


def cells_of(
    tasks: Sequence[Task],
    lengths: Sequence[int],
    count: int,
    seed: int,
    texts: Texts,
    prompter: Prompter,
) -> list[Cell]:
    """Returns the cells of this package's tasks, by length.

    Raises:
        InPlaceTTTError: if a text or a question file is missing, or cannot be read.
    """
    cells = []
    for length in lengths:
        for task in tasks:
            given = task, length, count, seed, texts.of(task), prompter
            asked = {"task": task.name, "length": length, "samples": count, "seed": seed}
            asked |= {"chat": prompter.chat, "tokenizer": prompter.digest, **task.made_of(texts.of(task))}
            cells.append(
                Cell(task.name, length, count, asked, partial(GeneratedTask, *given), partial(check, *given))
            )
    return cells


def cells_of_lm_eval(names: Sequence[str], count: int | None, seed: int, prompter: Prompter) -> list[Cell]:
    """Returns the cells of lm-eval's own tasks; a group stands for its tasks.

    Args:
        names: names of tasks or groups, or paths of YAML files.
        count: number of samples per task; None for all.
        seed: seed of tasks that sample their answers.
        prompter: tokenizes prompts.

    Raises:
        InPlaceTTTError: if a task is unknown, cannot be loaded, or cannot be run here.
    """
    named = [name for name in names if not (name.endswith(_FILES) and os.path.isfile(name))]
    for name in named:
        # the index of lm-eval's tasks takes seconds, and a name like this is not in it
        if not _NAME.fullmatch(name) or name not in _manager(True).task_index:
            raise InPlaceTTTError(
                f"task {shown(name)} does not exist; --tasks takes {', '.join(FAMILIES)}, their tasks (see "
                "docs/evaluate.md), lm-eval's own tasks (see `lm-eval ls tasks`), and YAML files."
            )
    if sys.stderr is None or not sys.stderr.isatty():
        datasets.disable_progress_bars()  # like our own bars, shown only on a terminal
    manager, loaded = _manager(bool(named)), dict[str, HarnessTask]()
    for name in names:
        with reported(f"lm-eval cannot load {name}", "check its files, or the connection to the hub"):
            loaded |= manager.load([name])["tasks"]
    cells = []
    for name, task in loaded.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise InPlaceTTTError(
                f"{name} runs code that the model writes, or shows images; run it with lm_eval itself."
            )
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        asked = {"task": name, "version": str(task.VERSION), "lm_eval": lm_eval.__version__}
        asked |= {"fewshot": task.get_config("num_fewshot"), "samples": count, "seed": seed}
        asked |= {"chat": prompter.chat, "tokenizer": prompter.digest}
        total = len(task.eval_docs)
        count_of = min(count or total, total)
        silent = task.OUTPUT_TYPE != "generate_until"
        cells.append(Cell(name, None, count_of, asked, partial(loaded.__getitem__, name), likelihoods=silent))
    return cells


@cache
def _manager(with_names: bool) -> TaskManager:
    """Returns lm-eval's task manager, if needed with the index of its own tasks."""
    return TaskManager(include_defaults=with_names)


def score(
    cells: Sequence[Cell],
    model: PreTrainedModel,
    columns: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    prompter: Prompter,
    results: Results,
    *,
    batch_size: int,
    seed: int,
    bar: Any,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Computes the missing results of one model, cell by cell.

    Args:
        cells: the tasks.
        model: a converted model or its base.
        columns: name -> context in which the model is read; only "on" writes.
        prompter: tokenizes prompts.
        results: receives the results, by "COLUMN-CELL".
        batch_size: prompts per batch.
        seed: seed of tasks that sample their answers.
        bar: progress bar, in samples.
        ready: called once every task is known to be possible.

    Raises:
        InPlaceTTTError: before `ready` is called, if a task is impossible.
    """
    asked = {
        "ends": ends_of(model, prompter.tokenizer),
        # the base's exact bits, and the TTT layers'
        "model": f"{digest_without_writes(model)} {fingerprint_of(model)}",
        "dtype": str(model.dtype),
    }
    missing: list[tuple[Cell, dict[str, dict[str, Any]]]] = []
    for cell in cells:
        wanted = {
            column: {**cell.asked, **asked, "config": config_of(model).to_dict() if column == "on" else None}
            for column in columns
        }
        wanted = {
            column: values
            for column, values in wanted.items()
            if results.get(f"{column}-{cell.name}", asked=values) is None
        }
        if wanted:
            cell.check()
            missing.append((cell, wanted))
        bar.update(cell.count * (len(columns) - len(wanted)))
    lm = PromptLM(model, prompter, batch_size)
    lm.answered = bar.update
    ready()
    for cell, wanted in missing:
        task = cell.make()
        for column, values in wanted.items():
            bar.set_postfix_str(f"{column}-{cell.name}")
            before = bar.n
            with columns[column]():
                torch.manual_seed(seed)
                result = _scored(lm, task, cell, prompter.chat)
            results.put(f"{column}-{cell.name}", {"asked": values, **result})
            bar.update(before + cell.count - bar.n)


def _scored(lm: PromptLM, task: HarnessTask, cell: Cell, chat: bool) -> dict[str, Any]:
    """Runs one task in lm-eval, and returns its metrics and samples."""
    lm.longest, name = cell.length or 0, task.task_name
    with reported(f"lm-eval cannot run {cell.task}", "leave it out, or run it with lm_eval itself"):
        found = evaluate(
            lm,
            {"tasks": {name: task}},
            limit=cell.count,
            bootstrap_iters=0,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    samples = found["samples"][name]
    metrics = {}
    for key, value in found["results"][name].items():
        metric, _, kind = key.partition(",")
        if not kind or metric.endswith("_stderr") or (number := _number(value)) is None:
            continue
        scores = [_number(sample.get(metric)) for sample in samples if sample["filter"] == kind]
        known = [score for score in scores if score is not None]
        paired = len(known) == len(scores) and isclose(sum(known) / len(known), number, rel_tol=1e-6)
        metrics[metric if kind == "none" else key] = {
            "value": number,
            "scores": known if paired else None,
            "higher_is_better": found["higher_is_better"][name].get(metric),
        }
    kept = ("tokens", "answers", "options", "guesses") if cell.length else ()
    return {
        "metrics": metrics,
        "samples": [
            {**{key: sample["doc"][key] for key in kept}, "prediction": _plain(sample["filtered_resps"])}
            for sample in samples
            if sample["filter"] == samples[0]["filter"]
        ],
    }


def _number(value: Any) -> float | None:
    """Returns a number of Python, numpy or torch as a float; None for anything else."""
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None


def _plain(responses: list[Any]) -> Any:
    """Returns the response to a sample's request, or the list of responses to several."""
    return responses[0] if len(responses) == 1 else responses

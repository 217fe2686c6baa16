"""Runs `inplace-ttt evaluate PATH --tasks TASK,…`."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from ..checkpoint.reading import Checkpoint
from ..errors import InPlaceTTTError, how_to_install, reported
from ..evaluation.harness.names import Texts, chosen, require_lm_eval
from ..evaluation.harness.table import render, table
from ..evaluation.prompt import Prompter, Task, samples
from ..files.folders import new_folder
from ..files.manifest import SAMPLES, refuse_to_replace
from ..files.results import Results
from ..files.text import require_known_ids
from ..surgery import config_of, disable_ttt
from . import Result
from .loading import (
    load_converted,
    load_plain,
    note_on_positions,
    refuse_not_finite,
    refuse_other_tokenizer,
    tokenizer_of,
)
from .messages import say_now, warn

_SAMPLES = 100
"""Samples per task of this package and length, unless --samples is given."""
_PROBE = "One of the special magic numbers for well-known is: 1234567.\n1. word 2. word Answer:"


def run(args: argparse.Namespace) -> Result:
    texts = Texts(tuple(args.text or ()), tuple(args.qa or ()), args.text_field)
    tasks, others = chosen(args.tasks.split(","), texts)
    for task in tasks:
        texts.of(task)  # raises if a text is missing
    lengths = _lengths(args, tasks)
    notes = texts.without_effect(tasks)
    if args.write_samples:
        return _write_samples(args, tasks, others, lengths, texts)
    results = Results(args.out)
    require_lm_eval()
    with reported("lm-eval cannot be imported", how_to_install("eval")):
        from ..evaluation.harness.scores import cells_of, cells_of_lm_eval, score
    tokenizer, seed = tokenizer_of(args.path), args.seed or 0
    prompter = Prompter(tokenizer, bool(args.chat))
    # before the model is loaded, because a task may be unknown
    cells = cells_of(tasks, lengths, args.samples or _SAMPLES, seed, texts, prompter)
    cells += cells_of_lm_eval(others, args.samples, seed, prompter) if others else []
    model = load_converted(args.path, None, args.dtype)
    require_known_ids(tokenizer, model, args.path)
    refuse_not_finite(model, args.path)
    notes += _notes(model, lengths)
    if args.base is not None:
        if Checkpoint.open(args.base).section is not None:
            raise InPlaceTTTError(
                f"{args.base} is a converted checkpoint; --base takes the checkpoint that it was converted "
                "from."
            )
        refuse_other_tokenizer(tokenizer_of(args.base), tokenizer, args.base, _PROBE)
    names = ["on", "off"] if args.base is None else ["on", "off", "base"]
    if config_of(model).prompt_write is not None and (silent := [c.task for c in cells if c.likelihoods]):
        notes.append(f"this model writes only before it answers, so on and off are the same for {silent}.")
    for note in notes:
        warn(note)
    total = sum(cell.count for cell in cells) * len(names)
    with tqdm(total=total, unit="sample", desc="evaluate", file=sys.stderr, disable=None) as bar:
        go = partial(score, cells, prompter=prompter, results=results, seed=seed, bar=bar, ready=say_now)
        go(model, {"on": nullcontext, "off": partial(disable_ttt, model)}, batch_size=args.batch_size or 1)
        chunk_size = config_of(model).chunk_size
        if args.base is not None:
            del model  # frees its memory for the base
            gc.collect()
            go(load_plain(args.base, args.dtype), {"base": nullcontext}, batch_size=args.batch_size or 1)
    return {
        "path": args.path,
        "base": args.base,
        "tasks": list(dict.fromkeys(cell.task for cell in cells)),
        "lengths": lengths,
        "samples": args.samples or (_SAMPLES if tasks else None),
        "seed": seed,
        "chat": prompter.chat,
        "chunk_size": chunk_size,
        "warnings": notes,
        **table(cells, names, results),
    }, 0


def shown(result: dict[str, Any]) -> str:
    """Returns the result in plain text."""
    if "written" in result:
        return f"wrote {result['written']:,} samples to {result['output']}"
    return render(result)


def _lengths(args: argparse.Namespace, tasks: tuple[Task, ...]) -> list[int]:
    if tasks and not args.lengths:
        raise InPlaceTTTError(f"{tasks[0].name} needs a length; give --lengths, such as 4096,8192.")
    if args.lengths and not tasks:
        raise InPlaceTTTError("--lengths does nothing for lm-eval's own tasks; leave it out.")
    return list(dict.fromkeys(args.lengths or ()))


def _write_samples(
    args: argparse.Namespace, tasks: tuple[Task, ...], others: list[str], lengths: list[int], texts: Texts
) -> Result:
    """Writes one file per task and length.

    Each line is {index, input, outputs, answer_prefix, length, tokens_to_generate}, and options, if there are
    any.
    """
    sources = [args.path, *texts.texts, *texts.questions]
    refuse_to_replace(args.write_samples, SAMPLES, sources=sources)
    if others:
        raise InPlaceTTTError(f"--write-samples writes RULER's and BABILong's tasks, not {others[0]!r}.")
    prompter, count = Prompter(tokenizer_of(args.path), bool(args.chat)), args.samples or _SAMPLES
    written = 0
    with (
        new_folder(args.write_samples, SAMPLES, sources=sources) as folder,
        tqdm(total=count * len(tasks) * len(lengths), unit="sample", file=sys.stderr, disable=None) as bar,
    ):
        for task, length in ((task, length) for length in lengths for task in tasks):
            made = samples(task, length, count, args.seed or 0, texts.of(task), prompter)
            with (folder / f"{task.name}-{length}.jsonl").open("w", encoding="utf-8") as file:
                for sample in made:
                    line = {
                        "index": sample.index,
                        "input": sample.draft.prompt,
                        "answer_prefix": sample.draft.answer_prefix,
                        "outputs": sample.draft.answers,
                        "length": len(sample.ids) + task.budget,
                        "tokens_to_generate": task.budget,
                    }
                    line |= {"options": sample.draft.options} if sample.draft.options else {}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    written += 1
                    bar.update()
    tasks_of = [task.name for task in tasks]
    return {"output": args.write_samples, "written": written, "tasks": tasks_of, "lengths": lengths}, 0


def _notes(model: PreTrainedModel, lengths: list[int]) -> list[str]:
    """Returns warnings about the lengths. Raises InPlaceTTTError for lengths that the model cannot read."""
    chunk_size = config_of(model).chunk_size
    notes = [note for length in lengths if (note := note_on_positions(model, length, "lower --lengths"))]
    if idle := [length for length in lengths if length <= chunk_size]:
        notes.append(
            f"at {idle} tokens no chunk of {chunk_size} is read after it was written, so on and off "
            "are the same."
        )
    return notes

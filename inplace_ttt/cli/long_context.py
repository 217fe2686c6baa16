"""Code that the verbs of long-context benchmarks share.

It runs a benchmark with TTT on, with TTT off and on the base, or writes its samples to files.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from tqdm import tqdm
from transformers import PreTrainedModel

from ..checkpoint.fingerprint import fingerprint_of
from ..checkpoint.opened import Full, open_model
from ..checkpoint.reading import Checkpoint
from ..errors import InPlaceTTTError
from ..evaluation.baseline_losses import digest_without_writes
from ..evaluation.long_context.answers import Settings, Variant, run_cells
from ..evaluation.long_context.prompt import Prompter, Task, samples
from ..files.folders import new_folder
from ..files.manifest import SAMPLES, refuse_to_replace
from ..files.results import Results
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

Table = Callable[[Settings, Sequence[str], Results], dict[str, Any]]
_Named = TypeVar("_Named", bound=Task)


def chosen(given: str | None, possible: Iterable[str], known: Mapping[str, _Named]) -> tuple[_Named, ...]:
    """Returns the tasks of --tasks, or by default those in `possible`.

    Args:
        given: names separated by commas.
        possible: names of the default tasks.
        known: name -> task.

    Raises:
        InPlaceTTTError: if a name is unknown.
    """
    names = possible if given is None else dict.fromkeys(given.split(","))
    if unknown := [name for name in names if name not in known]:
        raise InPlaceTTTError(f"task {unknown[0]!r} does not exist; --tasks takes {', '.join(known)}.")
    return tuple(known[name] for name in names)


def settings_of(args: argparse.Namespace, tasks: tuple[Task, ...]) -> Settings:
    return Settings(tasks, tuple(dict.fromkeys(args.lengths)), args.samples, args.seed, args.batch_size or 1)


def compare(args: argparse.Namespace, settings: Settings, material: Any, table: Table) -> Result:
    """Returns the verb's JSON object: the results with TTT on, with TTT off, and of --base.

    With --write-samples the samples are written to files instead.

    Args:
        args: the parsed arguments.
        settings: tasks, lengths and number of samples.
        material: texts and questions of the benchmark.
        table: computes the table from the results.
    """
    is_full = isinstance(open_model(args.path), Full)  # then --base is the model to compare with
    if args.write_samples:
        refuse_to_replace(args.write_samples, SAMPLES, sources=_sources(args))
        if args.base and is_full:
            raise InPlaceTTTError(
                "--base does nothing with --write-samples, which runs no model; leave it out."
            )
        return _write_samples(args, settings, material)
    base_of_adapter, base = (None, args.base) if is_full else (args.base, None)
    model = load_converted(args.path, base_of_adapter, args.dtype)
    refuse_not_finite(model, args.path)
    prompter = Prompter(tokenizer_of(args.path, base_of_adapter, model), args.chat)
    notes = _notes(model, settings)
    for note in notes:
        warn(note)
    if base is not None:
        if Checkpoint.open(base).section is not None:
            raise InPlaceTTTError(
                f"{base} is a converted checkpoint; --base takes the checkpoint that it was converted from."
            )
        refuse_other_tokenizer(tokenizer_of(base), prompter.tokenizer, base, _PROBE)
    results, names = Results(args.out), ["on", "off"] if base is None else ["on", "off", "base"]
    total = len(list(settings.cells())) * settings.count * len(names)
    with tqdm(total=total, unit="sample", desc=args.verb, file=sys.stderr, disable=None) as bar:

        def progress(what: str, done: int) -> None:
            bar.set_postfix_str(what, refresh=True)
            bar.update(done)

        go = partial(
            run_cells,
            settings,
            material=material,
            prompter=prompter,
            results=results,
            progress=progress,
            ready=say_now,
        )
        weights, config = _weights(model), config_of(model)
        off = partial(disable_ttt, model)
        go(
            [
                Variant("on", model, weights, config.to_dict(), nullcontext),
                Variant("off", model, weights, None, off),
            ]
        )
        if base is not None:
            del model, off  # frees its memory for the base
            gc.collect()
            go([_base(base, args.dtype)])
    return {
        "path": args.path,
        "base": base,
        "tasks": [task.name for task in settings.tasks],
        "lengths": settings.lengths,
        "samples": settings.count,
        "seed": settings.seed,
        "chat": args.chat,
        "chunk_size": config.chunk_size,
        "warnings": notes,
        **table(settings, names, results),
    }, 0


def _sources(args: argparse.Namespace) -> list[str]:
    """Returns the inputs of the command: a model, its base, texts and questions."""
    texts = [
        getattr(args, "haystack", None),
        *(getattr(args, "text", None) or ()),
        *(getattr(args, "qa", None) or ()),
    ]
    return [source for source in (args.path, args.base, *texts) if source is not None]


def render(result: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> str:
    if "written" in result:
        return f"wrote {result['written']:,} samples to {result['output']}"
    return table(result)


def _write_samples(args: argparse.Namespace, settings: Settings, material: Any) -> Result:
    """Writes one file per task and length.

    Each line is {index, input, outputs, answer_prefix, length, tokens_to_generate}, and options, if there are
    any.
    """
    prompter = Prompter(tokenizer_of(args.path, args.base), args.chat)
    total, written = settings.count * len(list(settings.cells())), 0
    with (
        new_folder(args.write_samples, SAMPLES, sources=_sources(args)) as folder,
        tqdm(total=total, unit="sample", file=sys.stderr, disable=None) as bar,
    ):
        for task, length in settings.cells():
            with (folder / f"{task.name}-{length}.jsonl").open("w", encoding="utf-8") as file:
                for sample in samples(task, length, settings.count, settings.seed, material, prompter):
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
    return {
        "output": args.write_samples,
        "written": written,
        "tasks": [task.name for task in settings.tasks],
        "lengths": settings.lengths,
    }, 0


_PROBE = "One of the special magic numbers for well-known is: 1234567.\n1. word 2. word Answer:"


def _notes(model: PreTrainedModel, settings: Settings) -> list[str]:
    """Returns warnings about the lengths. Raises InPlaceTTTError for lengths that the model cannot read."""
    chunk_size = config_of(model).chunk_size
    notes = [
        note for length in settings.lengths if (note := note_on_positions(model, length, "lower --lengths"))
    ]
    if idle := [length for length in settings.lengths if length <= chunk_size]:
        notes.append(
            f"at {idle} tokens no chunk of {chunk_size} is read after it was written, so on and off "
            "are the same."
        )
    return notes


def _base(path: str, dtype: str) -> Variant:
    model = load_plain(path, dtype)
    return Variant("base", model, _weights(model), None, nullcontext)


def _weights(model: PreTrainedModel) -> str:
    """Returns a digest of all weights: the base's exact bits, and the TTT layers'."""
    return f"{digest_without_writes(model)} {fingerprint_of(model)}"

"""`inplace-ttt ruler PATH --lengths 4096,8192`"""

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

from ..checkpoint.adapter import is_adapter
from ..checkpoint.fingerprint import fingerprint_of
from ..checkpoint.reading import Checkpoint
from ..errors import InPlaceTTTError
from ..evaluation.ruler import table as tables
from ..evaluation.ruler.answers import Settings, Variant, run_cells
from ..evaluation.ruler.material import Material
from ..evaluation.ruler.prompt import Draft, Prompter, samples
from ..evaluation.ruler.tasks import TASKS
from ..files.folders import new_folder
from ..files.results import Results
from ..surgery import config_of, ttt_disabled
from . import Result
from .arguments import dtype, numbers, path, seed, whole
from .loading import load_converted, load_plain, refuse_not_finite, tokenizer_of
from .messages import say_now, warn

EXAMPLES = """examples:
  inplace-ttt ruler ./smollm2-ttt --lengths 4096,8192 --haystack book.txt --samples 50 --batch-size 4 --out ruler
  inplace-ttt ruler ./smollm2-ttt --lengths 4096 --tasks niah_single_1,vt,fwe --base ./smollm2-135m
  inplace-ttt ruler ./smollm2-ttt --lengths 4096 --haystack book.txt --write-samples samples"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="converted checkpoint or adapter folder")
    parser.add_argument("--lengths", type=numbers, required=True, metavar="L,…", help="tokens of prompt and answer, such as 4096,8192")
    parser.add_argument("--tasks", metavar="T,…", help="RULER's names (default: all, qa_1 and qa_2 where --qa gives their files)")
    parser.add_argument(
        "--samples", type=whole(1, 10**6), default=100, metavar="N", help="a task and length (default: 100; the benchmark's own: 500)"
    )
    parser.add_argument("--haystack", type=path, metavar="F", help="UTF-8 text to hide needles in; RULER has Paul Graham's essays")
    parser.add_argument(
        "--qa", nargs="+", type=path, default=[], metavar="F", help="questions of qa_1, then of qa_2 (see docs/evaluate.md)"
    )
    parser.add_argument("--base", type=path, metavar="B", help="unconverted checkpoint to compare with; of an adapter, where its base is")
    parser.add_argument("--batch-size", type=whole(1), default=1, metavar="N", help="prompts at once (default: 1)")
    parser.add_argument("--seed", type=seed(), default=0, metavar="S", help="of the samples (default: 0)")
    parser.add_argument("--chat", action="store_true", help="ask in the tokenizer's chat template")
    parser.add_argument("--dtype", type=dtype, default="auto", metavar="D", help="float32, bfloat16, … (default: the checkpoint's)")
    parser.add_argument("--out", type=path, metavar="DIR", help="keep each result as it comes; the same command goes on where it stopped")
    parser.add_argument(
        "--write-samples", type=path, metavar="DIR", help="write the samples as JSON lines instead; needs PATH's tokenizer alone"
    )


def run(args: argparse.Namespace) -> Result:
    settings, material = _settings(args), Material(args.haystack, args.qa)
    _refuse_without_files(settings, args)
    if args.write_samples:
        return _write_samples(args, settings, material)
    model = load_converted(args.path, args.base if is_adapter(args.path) else None, args.dtype)
    refuse_not_finite(model, args.path)
    prompter = Prompter(tokenizer_of(args.path, args.base, model), args.chat)
    notes = _notes(model, settings)
    for note in notes:
        warn(note)
    base = None if is_adapter(args.path) else args.base
    if base is not None:
        if Checkpoint.open(base).section is not None:
            raise InPlaceTTTError(f"{base} is a converted checkpoint; --base takes what it was converted from.")
        _refuse_other_tokenizer(tokenizer_of(base), prompter, base)
    say_now()
    results, names = Results(args.out), ["on", "off"] if base is None else ["on", "off", "base"]
    total = len(list(settings.cells())) * settings.count * len(names)
    with tqdm(total=total, unit="sample", desc="ruler", file=sys.stderr, disable=None) as bar:

        def progress(what: str, done: int) -> None:
            bar.set_postfix_str(what, refresh=True)
            bar.update(done)

        go = partial(run_cells, settings, material=material, prompter=prompter, results=results, progress=progress)
        weights, config = fingerprint_of(model), config_of(model)
        off = partial(ttt_disabled, model)
        go([Variant("on", model, weights, config.to_dict(), nullcontext), Variant("off", model, weights, None, off)])
        if base is not None:
            del model, off  # the base takes its place
            gc.collect()
            go([_base(base, args.dtype)])
    return {
        "path": args.path,
        "base": base,
        "tasks": settings.tasks,
        "lengths": settings.lengths,
        "samples": settings.count,
        "seed": settings.seed,
        "chat": args.chat,
        "chunk_size": config.chunk_size,
        "warnings": notes,
        **tables.table(settings, names, results),
    }, 0


def render(result: dict[str, Any]) -> str:
    if "written" in result:
        return f"wrote {result['written']:,} samples to {result['output']}"
    return tables.render(result)


def _settings(args: argparse.Namespace) -> Settings:
    lengths = tuple(dict.fromkeys(args.lengths))
    possible = tuple(name for name, task in TASKS.items() if task.questions is None or task.questions < len(args.qa))
    tasks = possible if args.tasks is None else tuple(dict.fromkeys(args.tasks.split(",")))
    if unknown := [name for name in tasks if name not in TASKS]:
        raise InPlaceTTTError(f"there is no task {unknown[0]!r}; --tasks takes {', '.join(TASKS)}.")
    return Settings(tasks, lengths, args.samples, args.seed, args.batch_size)


def _refuse_without_files(settings: Settings, args: argparse.Namespace) -> None:
    if len(args.qa) > 2:
        raise InPlaceTTTError(f"--qa takes a file for qa_1 and one for qa_2, got {len(args.qa)}.")
    if not args.haystack and (need := [name for name in settings.tasks if TASKS[name].haystack]):
        raise InPlaceTTTError(f"{', '.join(need)} hide needles in a text; give one with --haystack F, or name other --tasks.")
    for name in settings.tasks:
        number = TASKS[name].questions
        if number is not None and number >= len(args.qa):
            raise InPlaceTTTError(f"{name} needs questions; give {'a file' if number == 0 else 'two files'} with --qa, or leave it out.")


def _write_samples(args: argparse.Namespace, settings: Settings, material: Material) -> Result:
    """A file a task and length; each line {index, input, outputs, answer_prefix, length, tokens_to_generate}."""
    prompter = Prompter(tokenizer_of(args.path, args.base), args.chat)
    total, written = settings.count * len(list(settings.cells())), 0
    with new_folder(args.write_samples) as folder, tqdm(total=total, unit="sample", file=sys.stderr, disable=None) as bar:
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
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    written += 1
                    bar.update()
    return {"output": args.write_samples, "written": written, "tasks": settings.tasks, "lengths": settings.lengths}, 0


def _refuse_other_tokenizer(other: Any, prompter: Prompter, base: str) -> None:
    draft = Draft("One of the special magic numbers for well-known is: 1234567.\n1. word 2. word", " Answer:", ())
    if Prompter(other, prompter.chat).ids(draft) != prompter.ids(draft):
        raise InPlaceTTTError(f"{base} has another tokenizer than the converted checkpoint, so that their prompts would differ.")


def _notes(model: PreTrainedModel, settings: Settings) -> list[str]:
    """What a reader of the table must know. Raises InPlaceTTTError for lengths that the model cannot read at all."""
    text, chunk_size = model.config.get_text_config(), config_of(model).chunk_size
    context, notes = getattr(text, "max_position_embeddings", None), []
    if context is not None and (beyond := [length for length in settings.lengths if length > context]):
        if getattr(text, "rope_parameters", None) is None:
            raise InPlaceTTTError(f"{beyond[0]} tokens exceed the {context} positions that this model has; lower --lengths.")
        notes.append(f"{beyond} tokens exceed the {context} positions that the model's config names; nothing is cut off.")
    if idle := [length for length in settings.lengths if length <= chunk_size]:
        notes.append(f"at {idle} tokens no chunk of {chunk_size} is read after it was written, so that on and off are the same.")
    return notes


def _base(path: str, dtype: str) -> Variant:
    model = load_plain(path, dtype)
    return Variant("base", model, fingerprint_of(model), None, nullcontext)

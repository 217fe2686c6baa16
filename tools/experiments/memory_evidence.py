"""Trains and evaluates the paper's rule, the reference code's and the preset `ridge` alike, over seeds.

    python tools/experiments/memory_evidence.py [--model gemma-3-270m] [--rules ridge paper reference] \\
        [--seeds 0 1 2] [--one-process] [--out docs/results/cpu-2026-11/memory]

The results show if writes store the content of a document.

SmolLM2-135M sees a window of 256 tokens and 4 sinks. For each rule and seed, `inplace-ttt train` trains conv
and P alone by recipes/evidence/smollm2-memory-cpu.yaml. `inplace-ttt evaluate` then reads 26 held-out
documents of 2,048 tokens with TTT on, off, and with another document's state. It also reads each with a
passage that repeats.

The models of seed 0 are read in three more ways: with full attention; with full attention at three times the
training length, on fewer documents; and behind the window at eight times. Losses without writes are those of
the base, and are measured once for all rules.

Gemma 3 270M (`tools/fetch/get_model.py --model gemma-3-270m`) keeps its own attention: windows of 512 tokens,
and the whole text in each sixth layer. It is scored past token 512. Its results are in memory-gemma-3-270m.

`--model smollm2-135m-float32` and `gemma-3-270m-float32` are the same models in float32, for processors
without bfloat16. The first one's results are in memory-float32.

The script resumes: it skips the results in OUT.json and the steps under runs/memory. OUT.json, OUT.png and the
tables have all results so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

import kept_runs
from memory_models import (
    BESIDES,
    DOCUMENTS,
    FAR,
    FAR_DOCUMENTS,
    LONG,
    LONG_DOCUMENTS,
    MODELS,
    RATES,
    RIVAL,
    TOKENS,
    Model,
)
from memory_record import Record
from memory_rules import MAIN, ONE_PROCESS, ROOT, RULES
from memory_tables import draw, print_tables

from inplace_ttt import InPlaceTTTError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", choices=MODELS)
    parser.add_argument("--rules", nargs="+", default=MAIN, choices=RULES, metavar="R", help="; ".join(RULES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="train the same batches in one process: for one core, or little memory",
    )
    parser.add_argument(
        "--besides",
        nargs="*",
        choices=(*BESIDES, RIVAL),
        help=f"further readings of seed 0 (default: all but {RIVAL})",
    )
    parser.add_argument(
        "--out", type=Path, help="default: docs/results/cpu-2026-11/memory, with the name of another model"
    )
    parser.add_argument(
        "--documents", type=int, default=DOCUMENTS, metavar="N", help="read fewer documents; needs an --out"
    )
    parser.add_argument("--table", action="store_true", help="run nothing; print the kept results")
    args = parser.parse_args()
    model = dataclasses.replace(MODELS[args.model], documents=args.documents)
    if args.documents != DOCUMENTS and args.out is None:
        parser.error("results of fewer documents need an --out of their own")
    if args.besides is not None and not set(args.besides) <= {*model.besides, RIVAL}:
        parser.error(f"{args.model} has no further readings; leave --besides out")
    name = "-".join(word for word in ("memory", model.folder) if word)
    out = args.out or ROOT / "docs" / "results" / "cpu-2026-11" / name
    kept_runs.split_texts()
    kept_runs.widen(model.widened, model.base)
    record = Record.open(out, model)
    besides = model.besides if args.besides is None else args.besides
    if args.one_process:
        model = dataclasses.replace(model, settings=(*model.settings, *ONE_PROCESS))
    for seed in [] if args.table else args.seeds:
        for name in args.rules:
            also = besides if seed == 0 and RULES[name].writes else []
            if not {"difference", *also} <= record.seeds.get((name, seed), {}).keys():
                measure(model, name, seed, also)
                record.collect()
                record.save()
    record.collect()
    record.save()
    print_tables(record)
    draw(record, out.with_suffix(".png"))
    return 0


def measure(model: Model, name: str, seed: int, besides: Iterable[str]) -> None:
    """Converts, trains and evaluates. A step that is done already is skipped."""
    rule, run = RULES[name], model.work / f"{kept_runs.slug(name)}-{seed}"
    first = next(other for other in RULES if RULES[other].convert == rule.convert)
    layers = ("--layers", model.layers) if rule.trains else ()
    converted = kept_runs.convert(model.base, model.work / kept_runs.slug(first), *layers, *rule.convert)
    if rule.trains:
        kept_runs.train(converted, run, seed, *model.settings, *rule.settings)
    else:
        kept_runs.leave_untrained(converted, run)
    base = () if rule.writes else ("--base", str(model.base))
    window = () if model.window is None else ("--window", str(model.window))
    past, cache = ("--skip", str(model.past)), ("--cache", str(model.work / "without-writes"))

    def read(out: str, documents: int, tokens: int, *how: str) -> None:
        kept_runs.read(
            run,
            run / "final" if rule.trains else converted,
            out,
            "--documents",
            str(documents),
            "--tokens",
            str(tokens),
            *cache,
            *how,
        )

    read("evaluation", model.documents, TOKENS, *window, *past, "--repeated-passage", *base)
    beside = {
        "full_attention": (model.documents, TOKENS, *past),
        "beyond_training": (LONG_DOCUMENTS, LONG, "--skip", str(TOKENS)),
        "far_beyond": (FAR_DOCUMENTS, FAR, *window, "--skip", str(TOKENS)),
        RIVAL: (model.documents, TOKENS, *window, *past, "--rivals", "--rates", RATES),
    }
    for key in besides:
        read(key.replace("_", "-"), *beside[key])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"memory_evidence: {error}")

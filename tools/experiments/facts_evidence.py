"""Measures if a model answers questions about facts that it read beyond its attention window.

    python tools/experiments/facts_evidence.py [--model M] [--runs R ...] [--seeds 0 1 2] [--far] [--one-process] \\
        [--out OUT]

A model is trained by recipes/evidence/smollm2-facts-cpu.yaml, behind a window of 256 tokens and 4 sinks. The
training facts have other relations than those that `inplace-ttt evaluate --facts` asks for. Four held-out
texts state four records each. The questions come 1,024 and 4,096 tokens later. With --far, two texts are also
asked 16,384 and 65,536 tokens later, for the first seed.

The run "gated" is the preset `ridge` with a gate of writes. "gate held at 1" has the same weights, and its
gate weighs all tokens alike. The script resumes: it skips the results in OUT.json and the steps under
runs/facts. `python tools/fetch/get_model.py --model gemma-3-270m` fetches Gemma.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import kept_runs
import torch
from matplotlib import pyplot
from matplotlib.ticker import NullLocator
from memory_models import MODELS, WINDOW, Model
from memory_rules import ONE_PROCESS, ROOT, RULES
from memory_tables import with_error
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTError, load
from inplace_ttt.files.folders import new_folder
from inplace_ttt.files.manifest import CHECKPOINT
from inplace_ttt.files.results import Results
from inplace_ttt.reports.statistics import Mean, wilson
from inplace_ttt.surgery import fast_weights
from inplace_ttt.tasks.facts import NEVER_TOLD, VERBATIM

WORK = ROOT / "runs" / "facts"
RECIPE = ROOT / "recipes" / "evidence" / "smollm2-facts-cpu.yaml"
RIDGE = ("--preset", "ridge", "--set", "ridge=0.1", "--calibrate", str(kept_runs.TRAIN))
RECORDS, TOKENS = 4, 2048
NEAR, FAR = (4, (1024, 4096)), (2, (16384, 65536))
"""Number of documents, and distances in tokens between facts and questions."""


@dataclass(frozen=True)
class Run:
    """A model to ask.

    Attributes:
        convert: options of `inplace-ttt convert`, apart from the layers.
        settings: settings of the recipe.
        trained: False to read the model as converted, which is the base.
        without_gate_of: the run with the same weights and an active gate; None for a run of its own.
    """

    convert: tuple[str, ...]
    settings: tuple[str, ...] = ()
    trained: bool = True
    without_gate_of: str | None = None


GRADIENT = ("--preset", "gradient", "--eta", "0.04", "--calibrate", str(kept_runs.TRAIN))
"""Options of untrained gradient steps. The conversion in memory_evidence.py chose this η for SmolLM2-135M."""
GATED = (*RIDGE, "--set", "write_gate=true")
RUNS = {
    "gated": Run(GATED),
    "gate held at 1": Run(GATED, without_gate_of="gated"),
    "no gate": Run(RIDGE),
    "paper": Run(RULES["paper"].convert, ("training.conv_learning_rate=1e-3",)),
    "no writes": Run((*RIDGE, "--set", "eta=0")),
    "untrained": Run(GATED, trained=False),
    **{
        f"gradient, untrained, {steps} steps": Run(
            (*GRADIENT, "--set", f"steps_per_chunk={steps}"), trained=False
        )
        for steps in (1, 4)
    },
    **{
        f"gradient, {steps} training steps": Run(
            GRADIENT,
            (
                "training.conv_learning_rate=null",
                "training.proj_learning_rate=null",
                f"training.steps={steps}",
            ),
        )
        for steps in (30, 90)
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", choices=MODELS)
    parser.add_argument(
        "--runs", nargs="+", default=["gated"], choices=RUNS, metavar="R", help="; ".join(RUNS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--far", action="store_true", help="also to 65,536 tokens, with the first seed")
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="train the same batches in one process: for one core, or little memory",
    )
    parser.add_argument(
        "--out", type=Path, help="default: docs/results/cpu-2026-11/facts, with the name of another model"
    )
    parser.add_argument("--table", action="store_true", help="run nothing; print the kept results")
    args = parser.parse_args()
    model = MODELS[args.model]
    out = args.out or ROOT / "docs" / "results" / "cpu-2026-11" / "-".join(
        word for word in ("facts", model.folder) if word
    )
    kept_runs.split_texts()
    kept_runs.widen(model.widened, model.base)
    protocol = {"window": WINDOW, "records": RECORDS, "near": NEAR, "far": FAR, **kept_runs.digests(RECIPE)}
    for seed, name in [] if args.table else [(seed, name) for seed in args.seeds for name in args.runs]:
        asked = {"near": NEAR} | ({"far": FAR} if args.far and seed == args.seeds[0] else {})
        for part, (documents, distances) in asked.items():
            if part in known(out, protocol)[1].get(name, {}).get(str(seed), {}):
                continue
            found = measure(
                model, name, seed, part, documents, distances, ONE_PROCESS if args.one_process else ()
            )
            results, runs = known(out, protocol)  # read again: another call may have written
            runs.setdefault(name, {}).setdefault(str(seed), {}).update(found)
            results.put(
                out.name,
                {"command": "python tools/experiments/facts_evidence.py", "protocol": protocol, "runs": runs},
            )
    _, runs = known(out, protocol)
    for name, seeds in runs.items():
        print_tables(name, seeds)
    draw(args.model, runs, out.with_suffix(".png"))
    return 0


def known(out: Path, protocol: dict[str, Any]) -> tuple[Results, dict[str, dict[str, Any]]]:
    """Returns the kept results, and the runs in them by name and seed."""
    results = Results(out.parent, "name another --out, or delete it")
    return results, (results.get(out.name, protocol=protocol) or {"runs": {}})["runs"]


def measure(
    model: Model,
    name: str,
    seed: int,
    part: str,
    documents: int,
    distances: tuple[int, ...],
    settings: tuple[str, ...],
) -> dict[str, Any]:
    """Converts, trains and asks. A step that is done already is skipped."""
    run, work = RUNS[name], WORK / model.folder
    first = next(other for other in RUNS if RUNS[other].convert == run.convert)
    folder = work / f"{kept_runs.slug(name)}-{seed}"
    converted = kept_runs.convert(
        model.base, work / kept_runs.slug(first), "--layers", model.layers, *run.convert
    )
    read = folder / "final" if run.trained else converted
    if run.without_gate_of:
        trained = work / f"{kept_runs.slug(run.without_gate_of)}-{seed}"
        kept_runs.made_by(folder, trained=kept_runs.stamp_of(trained))
        if not read.exists():
            hold_gate(trained / "final", read)
    elif run.trained:
        dtype = [setting for setting in model.settings if setting.startswith("model.dtype=")]
        kept_runs.train(converted, folder, seed, *dtype, *settings, *run.settings, recipe=RECIPE)
    else:
        kept_runs.leave_untrained(converted, folder)
    texts = ("--documents", str(documents), "--tokens", str(TOKENS), "--window", str(WINDOW))
    kept_runs.read(
        folder, read, part, *texts, "--facts", str(RECORDS), "--distances", ",".join(map(str, distances))
    )
    found = json.loads((folder / part / "evaluation.json").read_text())
    text = {key: found[key] for key in ("on", "off", "mismatched", "difference", "document_gain")}
    return {part: {"facts": found["facts"], "text": text}, "seconds": kept_runs.seconds_of(folder)}


def hold_gate(trained: Path, out: Path) -> None:
    """Saves a trained model with its gates reset to their start."""
    model = load(trained)
    for layer in fast_weights(model).values():
        assert layer.ttt.gate is not None
        torch.nn.init.zeros_(layer.ttt.gate)
    with new_folder(out, CHECKPOINT) as folder:
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(trained).save_pretrained(folder)


def print_tables(name: str, seeds: dict[str, dict[str, Any]]) -> None:
    """Prints the shares of right answers by kind, distance and reading, over the seeds.

    The last columns are the differences between on and other readings.
    """
    for part in ("near", "far"):
        tables = [values[part]["facts"] for values in seeds.values() if part in values]
        if not tables:
            continue
        print(
            f"\n{name}, {part}, {len(tables)} seeds, {tables[0]['documents']} documents: exact match (multiple choice), "
            "or hallucinated (declined)\n"
        )
        readings = list(tables[0]["readings"])
        print(
            f"| distance | asked | n | {' | '.join(readings)} | on - off, exact match | on - mismatched, exact match |"
        )
        print("|---" * (5 + len(readings)) + "|")
        for place, row in enumerate(tables[0]["readings"]["on"]):
            for kind in row["kinds"]:
                cells = [_share(tables, reading, place, kind) for reading in readings]
                gains = (
                    []
                    if kind == NEVER_TOLD
                    else [_gain(tables, other, place, kind) for other in ("off", "mismatched")]
                )
                print(
                    f"| {row['distance']:,} | {kind} | "
                    f"{sum(t['readings']['on'][place]['kinds'][kind]['n'] for t in tables)} | ",
                    end="",
                )
                print(" | ".join([*cells, *gains, *[""] * (2 - len(gains))]) + " |")
    texts = [values["near"]["text"] for values in seeds.values() if "near" in values]
    for key in ("difference", "document_gain") if texts else ():
        print(
            f"\n{name}, on text without facts: {key} "
            f"{', '.join(with_error(text[key]['mean'], text[key]['stderr']) for text in texts)}"
        )


def draw(model: str, runs: dict[str, dict[str, Any]], file: Path) -> None:
    """Draws the share of verbatim exact matches by distance, over the seeds, with 95 % intervals.

    The untrained base with retrieval and with full attention stands beside it.
    """
    figure, axes = pyplot.subplots(figsize=(7.5, 4.4), layout="constrained")
    for run, readings, line in (
        ("gated", ("on", "state_only", "mismatched", "off"), "-"),
        ("untrained", ("bm25", "full"), ":"),
    ):
        for reading in readings:
            if said := _said_verbatim(runs.get(run, {}).values(), reading):
                shares = [wilson(answers) for answers in said.values()]
                ends = [[abs(share[end] - share["share"]) for share in shares] for end in ("low", "high")]
                label = reading if run == "gated" else f"{reading}, the base"
                axes.errorbar(
                    [*said],
                    [share["share"] for share in shares],
                    yerr=ends,
                    label=label,
                    linestyle=line,
                    marker="o",
                    capsize=3,
                )
    distances = [distance for _, part in (NEAR, FAR) for distance in part]
    axes.set(
        xscale="log",
        xlabel="tokens between a fact and its question",
        ylabel="exact matches, verbatim",
        title=f"{model}, a window of {WINDOW}",
    )
    axes.set_xticks(distances, [f"{distance:,}" for distance in distances])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-0.02, 1)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=130)


def _said_verbatim(seeds: Iterable[dict[str, Any]], reading: str) -> dict[int, list[bool]]:
    """Returns for each distance if each answer matched, over the seeds."""
    said: dict[int, list[bool]] = {}
    for part in (values[part] for values in seeds for part in ("near", "far") if part in values):
        for row in part["facts"]["readings"].get(reading, ()):
            verbatim = row["kinds"][VERBATIM]
            right = round(verbatim["exact_match"]["share"] * verbatim["n"])
            said.setdefault(row["distance"], []).extend([True] * right + [False] * (verbatim["n"] - right))
    return said


def _share(tables: list[dict[str, Any]], reading: str, place: int, kind: str) -> str:
    rows = [table["readings"][reading] for table in tables]
    if any(place >= len(row) for row in rows):
        return ""
    shares = [row[place]["kinds"][kind] for row in rows]
    first, *more = (
        fmean(one[name]["share"] for one in shares)
        for name in ("exact_match", "multiple_choice", "hallucinated", "declined")
        if name in shares[0]
    )
    return f"{first:.2f}" + (f" ({more[0]:.2f})" if more else "")


def _gain(tables: list[dict[str, Any]], other: str, place: int, kind: str) -> str:
    """Returns the mean over the seeds. ± is the larger of two standard errors, over documents and over seeds."""
    found = [table["gains"][f"on - {other}"][place]["kinds"][kind]["exact_match"] for table in tables]
    over = Mean.of((one["mean"] for one in found), alone=0.0)
    return with_error(over.mean, max(over.stderr or 0.0, fmean(one["stderr"] or 0.0 for one in found)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"facts_evidence: {error}")

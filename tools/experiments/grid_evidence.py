"""Varies one choice at a time around the paper's rule and around `ridge`.

    python tools/experiments/grid_evidence.py [--points P ...] [--out docs/results/cpu-2026-11/grid]

The table has the training loss, on - off and document gain of each point. The setup is that of
memory_evidence.py, but shorter: 24 steps, 12 held-out documents, one seed. All points have the same rows. The
paper's rule has eta 1 and rates of 1e-3. Its variants change eta, the rate, the scale of P's start, a clip in
training, the target's source, or the trained parameters. Where every parameter is trained, the base is a
model that was trained alike with eta 0. LoRA has as many parameters as the writes, in float32, and is
compared with the untrained base. The script resumes: it skips the results in OUT.json and the steps under
runs/grid.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kept_runs
import memory_rules as rules
from memory_models import LAYERS, MODEL, WINDOW
from memory_tables import with_error
from safetensors.torch import load_file, save_file

from inplace_ttt import InPlaceTTTError
from inplace_ttt.checkpoint.reading import is_peft_adapter
from inplace_ttt.files.results import Results

ROOT = rules.ROOT
WORK = ROOT / "runs" / "grid"
STEPS, DOCUMENTS, TOKENS = 24, 12, 2048
NO_STOP = "monitor.stop_write_ratio=1e9"
"""Lets a run continue when its update norm exceeds ‖W0‖, since its loss is the finding."""


UNTOUCHED = "the base"


@dataclass(frozen=True)
class Point:
    """One point of the grid.

    Attributes:
        rule: conversion and training.
        start: factor on P after conversion.
        base: name of the point whose model is the base; UNTOUCHED for the untrained base, None for no base.
    """

    rule: rules.Rule
    start: float = 1.0
    base: str | None = None


def paper(*changed: str, rate: str = "1e-3", start: float = 1.0) -> Point:
    return Point(rules.papers("paper", "eta=1", *changed, rate=rate), start)


def every_parameter(eta: str, base: str | None = None) -> Point:
    """Trains every parameter.

    conv and P have the rates of the other points. The base's weights have a rate that does no harm.
    """
    rule = rules.papers("paper", f"eta={eta}")
    own = ("training.trainable=all", "training.learning_rate=2e-5", "training.proj_learning_rate=1e-3")
    return Point(rules.Rule(rule.convert, (*rule.settings, *own)), base=base)


POINTS = {
    "paper": paper(),
    **{f"eta {eta}": paper(f"eta={eta}") for eta in ("0.1", "0.3", "3", "10", "30")},
    **{f"rate {rate}": paper(rate=rate) for rate in ("3e-4", "3e-3", "1e-2")},
    "P starts 5 times smaller": paper(start=0.2),
    "P starts 5 times larger": paper(start=5.0),
    "clip 1e-5 in training": paper("clip.max_norm=1e-5", "clip.mode=always"),
    "clip at 1 % of W0 in training": paper("clip.max_norm=0.01", "clip.relative=true", "clip.mode=always"),
    "hidden-state target": paper("target=hidden_states"),
    "every parameter, eta 0": every_parameter("0"),
    "every parameter": every_parameter("1", base="every parameter, eta 0"),
    "LoRA, eta 0, beside the base": Point(
        rules.RULES["LoRA, eta 0"].trained("model.dtype=float32"), base=UNTOUCHED
    ),
    "ridge and LoRA": Point(
        rules.ridge().trained(*rules.LORA, "model.dtype=float32"), base="LoRA, eta 0, beside the base"
    ),
    "ridge": Point(rules.ridge()),
    "ridge, rank 0.25": Point(rules.ridge("whitening.rank=0.25")),
    "ridge, rank 1.0": Point(rules.ridge("whitening.rank=1.0")),
    "ridge, λ 0.1": Point(rules.ridge("ridge=0.1")),
    "ridge, λ 10": Point(rules.ridge("ridge=10")),
    "ridge, eta 1": Point(rules.ridge("eta=1")),
    "ridge, the sum": Point(rules.ridge("update_rule=sum", "ridge=null")),
    "ridge, random P": Point(rules.ridge("proj_init=random_diagonal")),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--points",
        nargs="+",
        default=list(POINTS),
        choices=POINTS,
        metavar="P",
        help="; ".join(POINTS).replace("%", "%%"),
    )
    parser.add_argument("--out", default=str(ROOT / "docs" / "results" / "cpu-2026-11" / "grid"))
    parser.add_argument("--table", action="store_true", help="run nothing; print the kept results")
    args = parser.parse_args()
    kept_runs.split_texts()
    out = Path(args.out)
    results = Results(out.parent, "name another --out, or delete it")
    held = results.get(out.name, protocol=protocol()) or {"points": []}
    rows = {row["point"]: row for row in held["points"]}
    for name in [] if args.table else args.points:
        if name not in rows:
            measure(name)
            rows[name] = found(name)
            results.put(
                out.name,
                {
                    "command": "python tools/experiments/grid_evidence.py",
                    "protocol": protocol(),
                    "points": in_order(rows),
                },
            )
    if not rows:
        sys.exit("nothing is measured yet; leave --table out.")
    print_table(in_order(rows))
    return 0


def in_order(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[name] for name in POINTS if name in rows]


def protocol() -> dict[str, Any]:
    how = {
        "window": WINDOW,
        "sinks": 4,
        "steps": STEPS,
        "documents": DOCUMENTS,
        "tokens": TOKENS,
        "seed": 0,
    }
    return {**how, **kept_runs.digests()}


def folder_of(name: str) -> Path:
    return WORK / kept_runs.slug(name)


def measure(name: str) -> None:
    """Trains and evaluates. A step that is done already is skipped."""
    point, run = POINTS[name], train(name)
    base = (
        ()
        if point.base is None
        else ("--base", str(MODEL if point.base == UNTOUCHED else whole(train(point.base))))
    )
    read = ("--documents", str(DOCUMENTS), "--tokens", str(TOKENS), "--window", str(WINDOW), *base)
    kept_runs.read(run, run / "final", "evaluation", *read, "--cache", str(rules.WORK / "without-writes"))


def train(name: str) -> Path:
    """Converts, scales P and trains. Returns the folder of the run."""
    point, run = POINTS[name], folder_of(name)
    unscaled, converted = (run.with_name(f"{run.name}-{kind}") for kind in ("unscaled", "converted"))
    how = ("--layers", LAYERS, *point.rule.convert)
    kept_runs.made_by(converted, **kept_runs.conversion(MODEL, *how), start=point.start)
    if not converted.exists():
        shutil.rmtree(unscaled, ignore_errors=True)
        kept_runs.command("convert", str(MODEL), str(unscaled), *how)
        scale_start(unscaled / "inplace_ttt.safetensors", point.start)
        unscaled.rename(converted)
    kept_runs.train(converted, run, 0, f"training.steps={STEPS}", NO_STOP, *point.rule.settings)
    return run


def whole(run: Path) -> Path:
    """Returns the trained model as one folder, with LoRA merged into its base."""
    final, merged = run / "final", run / "merged"
    if not is_peft_adapter(final):
        return final
    if not merged.exists():
        kept_runs.command("export", str(final), str(merged), "--format", "full")
    return merged


def scale_start(file: Path, factor: float) -> None:
    tensors = load_file(file)
    save_file(
        {name: x * factor if name.endswith(".proj") else x for name, x in tensors.items()},
        file,
        {"format": "pt"},
    )


def found(name: str) -> dict[str, Any]:
    """Returns the figures of one point. Losses are in nats per token."""
    run = folder_of(name)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    losses = [line["loss"] for line in steps]
    read = json.loads((run / "evaluation" / "evaluation.json").read_text())
    return {
        "point": name,
        "training_loss": {"first": losses[0], "highest": max(losses), "last": losses[-1]},
        "state_ratio": max(layer["state_ratio"] for layer in steps[-1]["layers"]),
        **{
            key: read[key]
            for key in ("on", "off", "base", "difference", "gain", "generic_gain", "document_gain")
        },
        "seconds": kept_runs.seconds_of(run),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| point | training loss: first, highest, last | ‖ηS‖ / ‖W0‖ at the end | on - off | document gain | on - "
        "base |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        losses = ", ".join(f"{row['training_loss'][key]:.3f}" for key in ("first", "highest", "last"))
        pairs = [row[key] for key in ("difference", "document_gain", "gain")]
        cells = ["" if pair is None else with_error(pair["mean"], pair["stderr"]) for pair in pairs]
        print(f"| {row['point']} | {losses} | {row['state_ratio']:.2f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"grid_evidence: {error}")

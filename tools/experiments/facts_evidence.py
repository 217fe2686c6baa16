"""Does a model answer what it read, once it was trained to? Facts told in books, and asked for beyond the attention window.

python tools/experiments/facts_evidence.py [--seeds 0 1 2] [--far] [--out docs/results/cpu-2026-11/facts]

SmolLM2-135M with compact keys learns by recipes/evidence/smollm2-facts-cpu.yaml, behind a window of 256 tokens and 4 sinks, from statements
of other relations than those that `inplace-ttt evaluate --facts` asks for. Four held-out texts tell four records each; the questions come
1,024 and 4,096 tokens later and, with --far, in two texts 16,384 and 65,536 tokens later, for the first seed. What is in OUT.json is done,
and so is every step kept under runs/facts; the next call goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import memory_evidence as evidence
from memory_evidence import HELD_OUT, LAYERS, MODEL, ROOT, WINDOW, command, timed, with_error

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.results import Results
from inplace_ttt.reports.statistics import Mean
from inplace_ttt.tasks.facts import NEVER_TOLD

WORK = ROOT / "runs" / "facts"
RECIPE = ROOT / "recipes" / "evidence" / "smollm2-facts-cpu.yaml"
TRAIN = evidence.WORK / "text" / "train"
CONVERT = ("--preset", "compact", "--set", "damping=0.1", "--layers", LAYERS, "--calibrate", str(TRAIN))
RECORDS, TOKENS = 4, 2048
NEAR, FAR = (4, (1024, 4096)), (2, (16384, 65536))
"""Documents, and distances between facts and questions."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--far", action="store_true", help="also to 65,536 tokens, with the first seed")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "cpu-2026-11" / "facts")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args()
    evidence.split_texts()
    results = Results(args.out.parent, "name another --out, or delete it")
    protocol = {"window": WINDOW, "records": RECORDS, "near": NEAR, "far": FAR, **evidence.digests(RECIPE)}
    held = results.get(args.out.name, protocol=protocol) or {"seeds": {}}
    for seed in [] if args.table else args.seeds:
        asked = {"near": NEAR} | ({"far": FAR} if args.far and seed == args.seeds[0] else {})
        known = held["seeds"].setdefault(str(seed), {})
        for name, (documents, distances) in asked.items():
            if name not in known:
                known |= measure(seed, name, documents, distances)
                results.put(args.out.name, {"command": "python tools/experiments/facts_evidence.py", "protocol": protocol, **held})
    print_tables(held["seeds"])
    return 0


def measure(seed: int, name: str, documents: int, distances: tuple[int, ...]) -> dict[str, Any]:
    """Convert, train, ask; what is done already is left alone."""
    converted, run = WORK / "compact", WORK / f"compact-{seed}"
    if not converted.exists():
        command("convert", str(MODEL), str(converted), *CONVERT)
    if not (run / "final").exists():
        changed = {"model.path": converted, "data.train": TRAIN, "output": run, "optimisation.seed": seed, "data.seed": seed}
        words = (word for key, value in changed.items() for word in ("--set", f"{key}={value}"))
        timed(run / "train.seconds", "train", str(RECIPE), "--no-audit", *words)
    if not (run / name).exists():
        texts = (*HELD_OUT, "--documents", str(documents), "--tokens", str(TOKENS), "--window", str(WINDOW))
        facts = ("--facts", str(RECORDS), "--distances", ",".join(map(str, distances)))
        timed(run / f"{name}.seconds", "evaluate", str(run / "final"), *texts, *facts, "--out", str(run / name))
    found = json.loads((run / name / "evaluation.json").read_text())
    text = {key: found[key] for key in ("on", "off", "foreign", "difference", "memory")}
    seconds = {note.stem: int(note.read_text()) for note in sorted(run.glob("*.seconds"))}
    return {name: {"facts": found["facts"], "text": text}, "seconds": seconds}


def print_tables(seeds: dict[str, dict[str, Any]]) -> None:
    """What is said, by kind, distance and reading, over the seeds; and the gains of on over the others."""
    for name in ("near", "far"):
        tables = [values[name]["facts"] for values in seeds.values() if name in values]
        if not tables:
            continue
        print(f"\n{name}, {len(tables)} seeds, {tables[0]['documents']} documents: said (chosen)\n")
        readings = list(tables[0]["readings"])
        print(f"| distance | asked | n | {' | '.join(readings)} | on - off, said | on - foreign, said |")
        print("|---" * (5 + len(readings)) + "|")
        for place, row in enumerate(tables[0]["readings"]["on"]):
            for kind in row["kinds"]:
                cells = [_share(tables, reading, place, kind) for reading in readings]
                gains = [] if kind == NEVER_TOLD else [_gain(tables, other, place, kind) for other in ("off", "foreign")]
                print(f"| {row['distance']:,} | {kind} | {sum(t['readings']['on'][place]['kinds'][kind]['n'] for t in tables)} | ", end="")
                print(" | ".join([*cells, *gains, *[""] * (2 - len(gains))]) + " |")
    texts = [values["near"]["text"] for values in seeds.values() if "near" in values]
    for key in ("difference", "memory"):
        if texts:
            print(f"\n{key} on text without facts: {', '.join(with_error(text[key]['mean'], text[key]['stderr']) for text in texts)}")


def _share(tables: list[dict[str, Any]], reading: str, place: int, kind: str) -> str:
    rows = [table["readings"][reading] for table in tables]
    if any(place >= len(row) for row in rows):
        return ""
    shares = [row[place]["kinds"][kind] for row in rows]
    first, *more = (fmean(one[name]["share"] for one in shares) for name in ("said", "chosen", "invented") if name in shares[0])
    return f"{first:.2f}" + (f" ({more[0]:.2f})" if more else "")


def _gain(tables: list[dict[str, Any]], other: str, place: int, kind: str) -> str:
    """Mean over the seeds; ± the larger of two standard errors, over questions and over seeds."""
    found = [table["gains"][f"on - {other}"][place]["kinds"][kind]["said"] for table in tables]
    over = Mean.of((one["mean"] for one in found), alone=0.0)
    return with_error(over.mean, max(over.stderr or 0.0, fmean(one["stderr"] or 0.0 for one in found)))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"facts_evidence: {error}")

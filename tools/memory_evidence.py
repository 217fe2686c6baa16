"""Do writes store memory? The paper's rule, the public code's and the `stable` preset, trained and evaluated alike, over seeds.

python tools/memory_evidence.py [--rules stable,paper,official] [--seeds 0,1,2] [--out docs/results/cpu-2026-11/memory]

SmolLM2-135M sees a window of 256 tokens and 4 sinks. For each rule and seed, `inplace-ttt train` trains conv and P alone by
recipes/evidence/smollm2-memory-cpu.yaml, and `inplace-ttt evaluate` reads 26 held-out documents of 2,048 tokens with TTT on,
off, and with foreign memory, then with a passage that comes again. Every step that is done is kept under runs/memory and skipped
by the next call, which goes on where the last one stopped. OUT.json and the table have what is there so far.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "runs" / "memory"
RECIPE = ROOT / "recipes" / "evidence" / "smollm2-memory-cpu.yaml"
MODEL, TEXT = ROOT / ".cache" / "smollm2-135m", ROOT / ".cache" / "text"
DOCUMENTS, TOKENS, WINDOW = 26, 2048, 256
TEXTS = ("--text", str(WORK / "text" / "held-out"), "--documents", str(DOCUMENTS), "--tokens", str(TOKENS))
LONG_ENOUGH = 12_000
"""Bytes of a file that surely has so many tokens."""


@dataclass(frozen=True)
class Rule:
    """convert: options beyond the layers; settings: of the recipe."""

    convert: tuple[str, ...]
    settings: tuple[str, ...] = ()


def papers(eta: str, rate: str, preset: str = "paper") -> Rule:
    """A rule of the paper's kind at the same chunk size, with its η and learning rate."""
    return Rule(
        ("--preset", preset, "--chunk-size", "128", "--eta", eta),
        (f"optimisation.learning_rate={rate}", f"optimisation.conv_learning_rate={rate}"),
    )


RULES: dict[str, Rule] = {
    "stable": Rule(("--preset", "stable", "--calibrate", str(WORK / "text" / "train"))),
    "paper": papers("1", "1e-3"),
    "official": papers("3", "1e-3", "official"),
}
RULES |= {f"paper, eta {eta}, rate {rate}": papers(eta, rate) for eta in ("0.3", "1", "3") for rate in ("3e-4", "1e-3", "3e-3")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default="stable,paper,official", help=f"of: {'; '.join(RULES)} (separate those with commas by |)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default=str(ROOT / "docs" / "results" / "cpu-2026-11" / "memory"))
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    args = parser.parse_args()
    names = args.rules.split("|" if "|" in args.rules or args.rules in RULES else ",")
    if unknown := [name for name in names if name not in RULES]:
        parser.error(f"there is no rule {unknown[0]!r}")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if not args.table:
        split_texts()
        full_attention()
        for seed in seeds:
            for name in names:
                measure(name, seed)
    report(Path(args.out))
    return 0


def split_texts() -> None:
    """Every ninth long file is held out; links, so that the recipe and the command line see two folders."""
    files = sorted(TEXT.rglob("*.txt"))
    held = [file for file in files if file.stat().st_size > LONG_ENOUGH][4::9]
    for file in files:
        link = WORK / "text" / ("held-out" if file in held else "train") / "-".join(file.relative_to(TEXT).parts)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file)


def full_attention() -> None:
    """The base without a window on the same documents: what a perfect memory of all that lies beyond the window could gain."""
    converted, out = WORK / "paper", WORK / "full-attention"
    if not converted.exists():
        command("convert", str(MODEL), str(converted), "--layers", "12,18,24", *RULES["paper"].convert)
    if not out.exists():
        command("evaluate", str(converted), *TEXTS, "--skip", str(WINDOW), "--out", str(out))


def measure(name: str, seed: int) -> None:
    """Convert, train, evaluate; what is done already is left alone."""
    rule, slug = RULES[name], name.replace(", ", "-").replace(" ", "")
    converted, run = WORK / slug, WORK / f"{slug}-{seed}"
    if not converted.exists():
        command("convert", str(MODEL), str(converted), "--layers", "12,18,24", *rule.convert)
    if not (run / "final").exists():
        settings = [f"model.path={converted}", f"data.train={WORK / 'text' / 'train'}", f"output={run}"]
        settings += [f"optimisation.seed={seed}", f"data.seed={seed}", *rule.settings]
        timed(run / "train.seconds", "train", str(RECIPE), "--no-audit", *(word for s in settings for word in ("--set", s)))
    if not (run / "evaluation").exists():
        how = ["--window", str(WINDOW), "--second-copy", "--out", str(run / "evaluation")]
        timed(run / "evaluate.seconds", "evaluate", str(run / "final"), *TEXTS, *how)


def timed(note: Path, *words: str) -> None:
    began = time.perf_counter()
    command(*words)
    note.write_text(f"{time.perf_counter() - began:.0f}\n")


def command(*words: str) -> None:
    print("inplace-ttt", *words, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "inplace_ttt.cli", *words], cwd=ROOT, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"`inplace-ttt {words[0]}` failed with exit code {done.returncode}; its message is above, and the same command goes on.")


def report(out: Path) -> None:
    rows = [row for name in RULES if (row := _row(name)) is not None]
    if not rows:
        print("nothing is measured yet")
        return
    full = json.loads((WORK / "full-attention" / "evaluation.json").read_text())["off"]
    head_room = rows[0]["seeds"][0]["off"] - full
    values = {
        "full_attention": full,
        "head_room": head_room,
        "command": "python tools/memory_evidence.py " + " ".join(sys.argv[1:]),
        "protocol": {"documents": DOCUMENTS, "tokens": TOKENS, "window": WINDOW, "sinks": 4, "past_token": WINDOW},
        "held_out_sha256": _digest(WORK / "text" / "held-out"),
        "train_sha256": _digest(WORK / "text" / "train"),
        "rules": rows,
    }
    out.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    print("| rule | seeds | on - off | foreign - off | memory: on - foreign | second copy | filler |\n|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [_cell(row[key]) for key in ("difference", "drift", "memory", "second_copy", "filler")]
        print(f"| {row['rule']} | {len(row['seeds'])} | {' | '.join(cells)} |")
    print(
        f"\nFull attention would gain {head_room:.4f}. Mean over seeds; ± the larger of two standard errors, over documents and over seeds."
    )


def _row(name: str) -> dict[str, Any] | None:
    slug, seeds = name.replace(", ", "-").replace(" ", ""), []
    for folder in sorted(WORK.glob(f"{slug}-[0-9]")):
        if (folder / "evaluation").exists():
            found = json.loads((folder / "evaluation" / "evaluation.json").read_text())
            pairs = {key: found[key] for key in ("difference", "drift", "memory")}
            pairs |= {key: found["second_copy"][key] for key in ("second_copy", "filler")}
            losses = {key: found[key] for key in ("on", "off", "foreign")}
            notes = {
                key: int((folder / f"{key}.seconds").read_text()) for key in ("train", "evaluate") if (folder / f"{key}.seconds").exists()
            }
            seeds.append({"seed": int(folder.name.rpartition("-")[2]), "seconds": notes, **losses, **pairs})
    if not seeds:
        return None
    keys = ("difference", "drift", "memory", "second_copy", "filler")
    return {"rule": name, **{key: _over(seeds, key) for key in keys}, "seeds": seeds}


def _over(seeds: list[dict[str, Any]], key: str) -> dict[str, float]:
    means = [seed[key]["mean"] for seed in seeds]
    over_documents = fmean(seed[key]["stderr"] for seed in seeds)
    over_seeds = stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
    return {"mean": fmean(means), "stderr_documents": over_documents, "stderr_seeds": over_seeds}


def _cell(value: dict[str, float]) -> str:
    return f"{value['mean']:+.4f} ± {max(value['stderr_documents'], value['stderr_seeds']):.4f}"


def _digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

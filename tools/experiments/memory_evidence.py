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

`--model smollm2-135m-float32` is the same model in float32, for processors without bfloat16. Its results are
in memory-float32.

The script resumes: it skips the results in OUT.json and the steps under runs/memory. OUT.json, OUT.png and the
tables have all results so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import kept_runs
from matplotlib import pyplot
from memory_rules import MAIN, ONE_PROCESS, ROOT, RULES, WORK

from inplace_ttt import InPlaceTTTError
from inplace_ttt.attention_window import SINKS
from inplace_ttt.files.results import Results
from inplace_ttt.reports.statistics import Mean

MODEL = ROOT / ".cache" / "smollm2-135m"
LAYERS = "12,18,24"
DOCUMENTS, TOKENS, WINDOW = 26, 2048, 256
LONG_DOCUMENTS, LONG = 12, 3 * TOKENS
FAR_DOCUMENTS, FAR = 8, 8 * TOKENS
BESIDES = ("full_attention", "beyond_training", "far_beyond")
"""Further readings of seed 0."""
RIVAL, RATES = "dynamic_evaluation", "1,5,20"
"""A further reading that only `--besides` asks for: dynamic evaluation, by learning rates."""
CHOSEN_ON = 10
"""Number of documents on which choices were made: the rates, the start of P, the rank and η of `ridge`.

The other documents are unseen.
"""

LOSSES = ("off", "on", "mismatched")
COLUMNS = (
    "difference",
    "gain",
    "generic_gain",
    "document_gain",
    "document_gain_unseen",
    "repeated_passage",
    "between",
)


@dataclass(frozen=True)
class Model:
    """A model to train and read.

    Attributes:
        base: folder of the base.
        layers: TTT layers, as on the command line.
        window: attention window in training and reading; None for the model's own attention.
        past: number of first tokens that are not scored.
        folder: name of its folder under runs/memory and of its results.
        settings: settings of the recipe.
        besides: further readings of seed 0.
        widened: the checkpoint of which `base` is a copy in float32; None for a base of its own.
    """

    base: Path
    layers: str
    window: int | None
    past: int
    folder: str = ""
    settings: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()
    widened: Path | None = None

    @property
    def work(self) -> Path:
        return WORK / self.folder

    def protocol(self) -> dict[str, Any]:
        attention = {"window": self.window, **({} if self.window is None else {"sinks": SINKS})}
        beyond = {
            "beyond_training": {"number": LONG_DOCUMENTS, "tokens": LONG, "past_token": TOKENS},
            "far_beyond": {
                "number": FAR_DOCUMENTS,
                "tokens": FAR,
                "past_token": TOKENS,
                "window": self.window,
            },
        }
        documents = {"number": DOCUMENTS, "tokens": TOKENS, "past_token": self.past}
        return {
            **attention,
            "documents": documents,
            **{key: beyond[key] for key in beyond if key in self.besides},
            **kept_runs.digests(),
        }


SMOLLM2 = Model(MODEL, LAYERS, WINDOW, past=WINDOW, besides=BESIDES)
MODELS = {
    "smollm2-135m": SMOLLM2,
    "smollm2-135m-float32": dataclasses.replace(
        SMOLLM2,
        base=WORK / "smollm2-135m-float32",
        folder="float32",
        settings=("model.dtype=float32",),
        widened=MODEL,
    ),
    "gemma-3-270m": Model(
        MODEL.with_name("gemma-3-270m"),
        "7,11,14",
        None,
        past=512,
        folder="gemma-3-270m",
        settings=("model.window=null", *ONE_PROCESS),
    ),
}


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
    parser.add_argument("--table", action="store_true", help="run nothing; print the kept results")
    args = parser.parse_args()
    model = MODELS[args.model]
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

    read("evaluation", DOCUMENTS, TOKENS, *window, *past, "--repeated-passage", *base)
    beside = {
        "full_attention": (DOCUMENTS, TOKENS, *past),
        "beyond_training": (LONG_DOCUMENTS, LONG, "--skip", str(TOKENS)),
        "far_beyond": (FAR_DOCUMENTS, FAR, *window, "--skip", str(TOKENS)),
        RIVAL: (DOCUMENTS, TOKENS, *window, *past, "--rivals", "--rates", RATES),
    }
    for key in besides:
        read(key.replace("_", "-"), *beside[key])


@dataclass
class Record:
    """Results by rule and seed, as `_seed` returns them. OUT.json holds them."""

    results: Results
    name: str
    model: Model
    seeds: dict[tuple[str, int], dict[str, Any]]

    @classmethod
    def open(cls, path: Path, model: Model) -> Record:
        results = Results(path.parent, "name another --out, or delete it")
        held = results.get(path.name, protocol=model.protocol()) or {"rules": []}
        return cls(
            results,
            path.name,
            model,
            {(row["rule"], seed["seed"]): seed for row in held["rules"] for seed in row["seeds"]},
        )

    def collect(self) -> None:
        """Adds the results under runs/memory."""
        for name in RULES:
            for run in self.model.work.glob(f"{kept_runs.slug(name)}-[0-9]*"):
                if (
                    not run.name.removeprefix(f"{kept_runs.slug(name)}-").isdecimal()
                    or not (run / "evaluation").exists()
                ):
                    continue
                if not kept_runs.digests().items() <= (kept_runs.stamp_of(run) or {}).items():
                    print(
                        f"{run} was trained by another recipe or on other texts, and is skipped",
                        file=sys.stderr,
                    )
                else:
                    self.seeds[name, int(run.name.rpartition("-")[2])] = _seed(run)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per rule, over its seeds."""
        found = {name: [self.seeds[key] for key in sorted(self.seeds) if key[0] == name] for name in RULES}
        return [
            {"rule": name, **_over_seeds(seeds), "seeds": seeds} for name, seeds in found.items() if seeds
        ]

    def having(self, *what: str) -> list[tuple[str, dict[str, Any]]]:
        """Returns rule and values of each seed that has one of these readings."""
        return [
            (row["rule"], seed) for row in self.rows() for seed in row["seeds"] if seed.keys() & set(what)
        ]

    def save(self) -> None:
        command = f"python tools/experiments/memory_evidence.py --model {self.model.base.name}"
        self.results.put(
            self.name, {"command": command, "protocol": self.model.protocol(), "rules": self.rows()}
        )


def print_tables(record: Record) -> None:
    differences = (
        "on - off",
        "on - base",
        "mismatched - off",
        "document gain: on - mismatched",
        "the same, unseen",
        "repeated passage",
        "between",
    )
    print(f"| rule | seeds | {' | '.join((*LOSSES, *differences))} |")
    print("|---" * (2 + len(LOSSES) + len(differences)) + "|")
    for row in record.rows():
        cells = [*(f"{row[key]:.4f}" for key in LOSSES), *(_cell(row[key]) for key in COLUMNS)]
        print(f"| {row['rule']} | {len(row['seeds'])} | {' | '.join(cells)} |")
    print("\nMean over seeds; ± the larger of two standard errors, over documents and over seeds.\n")
    print_beside_training(record.rows())
    print_rival(record)
    beside = record.having(*BESIDES)
    if not beside:
        return
    full = record.having("full_attention")
    for where, key in (("all documents", "off"), ("the unseen ones", "off_unseen")):
        gains = [
            values[key] - values["full_attention"][key]
            for _, values in full
            if key in values and key in values["full_attention"]
        ]
        if gains:
            print(f"On {where}, full attention gains {gains[0]:.4f} over the window.")
    print(
        f"\nSeed 0, on - off and document gain: full attention, at and past {TOKENS} of {LONG} tokens; the "
        f"window, past {TOKENS} of {FAR}:\n"
    )
    print(f"| rule | {'on - off | document gain | ' * len(BESIDES)}document gain at {TOKENS}, at the end |")
    print("|---" * (2 + 2 * len(BESIDES)) + "|")
    for name, values in beside:
        pairs = [
            values.get(where, {}).get(key) for where in BESIDES for key in ("difference", "document_gain")
        ]
        cells = [
            "not read yet" if pair is None else with_error(pair["mean"], pair["stderr"]) for pair in pairs
        ]
        rows = values.get("far_beyond", {}).get("positions", [])
        known = [_memory(row) for row in rows if row["stop"] <= TOKENS]
        cells.append(f"{known[-1]:+.4f}, {_memory(rows[-1]):+.4f}" if known else "not read yet")
        print(f"| {name} | {' | '.join(cells)} |")


def print_rival(record: Record) -> None:
    """Prints dynamic evaluation of the same down-projections, by learning rate."""
    columns = ("difference", "document_gain", "on_minus_dynamic")
    for name, values in record.having(RIVAL):
        print(
            f"\nDynamic evaluation of the layers of {name}:\n\n| rate | {' | '.join(columns)} |\n|---|---|---|---|"
        )
        for row in values[RIVAL]:
            cells = (with_error(row[key]["mean"], row[key]["stderr"]) for key in columns)
            print(f"| {row['rate']:g} | {' | '.join(cells)} |")


def print_beside_training(rows: list[dict[str, Any]]) -> None:
    """Prints the gain of the rules beside models that were trained alike without writes.

    Errors are computed as if the two had read different documents, so they are too large.
    """
    for other in rows:
        if not RULES[other["rule"]].writes:
            gains = (
                f"{row['rule']} {_less(row['gain'], other['gain'])}" for row in rows if row["rule"] in MAIN
            )
            print(f"Beside {other['rule']}, on - base: {', '.join(gains)}.\n")


def _less(value: dict[str, float], other: dict[str, float]) -> str:
    return with_error(value["mean"] - other["mean"], math.hypot(_error(value), _error(other)))


def draw(record: Record, file: Path) -> None:
    """Draws on - off and document gain by position, behind the window, up to and beyond the length of the
    training rows."""
    read = record.having("far_beyond")
    if not read:
        return
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.4), sharex=True, layout="constrained")
    for name, values in read:
        rows = values["far_beyond"]["positions"]
        middle = [(row["start"] + row["stop"]) / 2 for row in rows]
        for axes, heights in zip(
            panels, ([row["difference"] for row in rows], [_memory(row) for row in rows]), strict=True
        ):
            axes.plot(middle, heights, marker="o", markersize=3, label=name)
    for axes, title in zip(panels, ("on - off", "document gain: on - mismatched"), strict=True):
        axes.axhline(0, color="#8a8f98", linewidth=1)
        axes.axvline(
            TOKENS, color="#8a8f98", linewidth=1, linestyle=":", label=f"rows of {TOKENS:,} tokens end"
        )
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set(
            xlabel="position in the document (tokens)",
            ylabel="nats per token",
            title=title,
        )
    figure.suptitle("Behind the window, seed 0")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=130)


def _seed(run: Path) -> dict[str, Any]:
    """Returns the results of one seed."""
    found = _evaluation(run / "evaluation")
    values = {"seed": int(run.name.rpartition("-")[2]), **_numbers(found)}
    values |= {key: found["repeated_passage"][key] for key in ("repeated_passage", "between")}
    for key in BESIDES:
        if (folder := run / key.replace("_", "-")).exists():
            found = _evaluation(folder)
            values[key] = {**_numbers(found), "positions": [_position(row) for row in found["positions"]]}
    if (folder := run / RIVAL.replace("_", "-")).exists():
        values[RIVAL] = _evaluation(folder)[RIVAL]
    return {**values, "seconds": kept_runs.seconds_of(run)}


def _evaluation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    values = {
        key: found[key] for key in ("on", "off", "mismatched", "difference", "generic_gain", "document_gain")
    }
    # without a base beside it, off is the base: conv and P alone have learned
    values["gain"] = found["gain"] or found["difference"]
    if len(found["documents"]) == DOCUMENTS:
        unseen = found["documents"][CHOSEN_ON:]
        values["document_gain_unseen"] = vars(
            Mean.of([row["own_minus_mismatched"] for row in unseen], alone=0.0)
        )
        if all("off" in row for row in unseen):
            values["off_unseen"] = fmean(row["off"] for row in unseen)
    return values


def _position(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "start": row["start"],
        "stop": row["stop"],
        "difference": row["on"] - row["off"],
        "generic_gain": row["mismatched"] - row["off"],
    }


def _memory(position: dict[str, Any]) -> float:
    return float(position["difference"] - position["generic_gain"])


def _over_seeds(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{key: fmean(seed[key] for seed in seeds) for key in LOSSES},
        **{key: _over(seeds, key) for key in COLUMNS},
    }


def _over(seeds: list[dict[str, Any]], key: str) -> dict[str, float]:
    found = Mean.of((seed[key]["mean"] for seed in seeds), alone=0.0)
    return {
        "mean": found.mean,
        "stderr_documents": fmean(seed[key]["stderr"] for seed in seeds),
        "stderr_seeds": found.stderr,
    }


def _cell(value: dict[str, float]) -> str:
    return with_error(value["mean"], _error(value))


def _error(value: dict[str, float]) -> float:
    return max(value["stderr_documents"], value["stderr_seeds"])


def with_error(mean: float, error: float) -> str:
    return f"{mean:+.4f} ± {error:.4f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InPlaceTTTError as error:
        sys.exit(f"memory_evidence: {error}")

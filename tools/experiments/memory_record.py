"""The results of the memory evidence by rule and seed, and their means over seeds."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import kept_runs
from memory_models import (
    BESIDES,
    CHOSEN_ON,
    DOCUMENTS,
    RIVAL,
    Model,
)
from memory_rules import RULES

from inplace_ttt.files.results import Results
from inplace_ttt.reports.statistics import Mean

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

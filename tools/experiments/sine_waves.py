"""Prints the sine-wave table of Titans' proof of concept, our test errors beside the published ones.

python tools/experiments/sine_waves.py recipes/memories/sine-cpu.yaml --json docs/results/cpu-2026-11/sine.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
from sine import Sine, table, train_one

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.results import Results
from inplace_ttt.files.settings import read_settings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="replace settings of the recipe"
    )
    parser.add_argument(
        "--json", type=Path, help="also write the figures to this file; runs that it holds are skipped"
    )
    args = parser.parse_args()
    try:
        settings = read_settings(Sine, args.recipe, args.set)
        rows = run(settings, args.json)
    except InPlaceTTTError as error:
        print(f"sine_waves: {error}", file=sys.stderr)
        return 2
    print(f"{'':10} {'test MSE':>18} {'published':>10} {'parameters':>11} {'seconds':>8}")
    for line in table(rows, settings):
        of_model = [row for row in rows if row["model"] == line["model"]]
        published = "" if line["published"] is None else f"{line['published']:.4f}"
        seconds = sum(row["seconds"] for row in of_model) / len(of_model)
        print(
            f"{line['model']:10} {line['mean']:9.4f} ± {line['stderr']:.4f} {published:>10} "
            f"{of_model[0]['parameters']:11,} {seconds:8.0f}"
        )
    return 0


def run(settings: Sine, file: Path | None) -> list[dict[str, object]]:
    """Runs every model with every seed. Each result is saved at once, so an interrupted command can resume."""
    about = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": dataclasses.asdict(settings),
    }
    results, name = Results(file and file.parent, "name another file"), file.stem if file else "sine"
    rows = (results.get(name, settings=about["settings"]) or {"rows": []})["rows"]
    for seed in settings.seeds:
        for model in settings.models:
            if not any((row["model"], row["seed"]) == (model, seed) for row in rows):
                rows.append(train_one(model, seed, settings))
                results.put(name, {"command": " ".join(["python", *sys.argv]), **about, "rows": rows})
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""Compares the throughput of a recipe's run with that of transformers' Trainer.

    python tools/bench/bench_trainer.py --model .cache/smollm2-135m --pairs 3 --out trainer.json

All runs have the same rows and ZeRO stage. They take turns, each in a process of its own:

- ours: the run that `train` starts.
- trainer: `Trainer` with the same converted model. The difference to ours is the cost of our monitors and
  guards.
- base: `Trainer` with the unconverted model. The difference to ours is the whole cost of TTT.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

FORMS = ("ours", "trainer", "base")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2-135m")
    parser.add_argument("--text", default=".cache/text/shakespeare/hamlet.txt")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6, help="steps per run; the first is not counted")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--measure", nargs=2, metavar=("FORM", "RECIPE"), help="run as one of the measured processes"
    )
    args = parser.parse_args()
    if args.measure:
        print("SECONDS", measure(*args.measure))
        return
    import torch

    with tempfile.TemporaryDirectory() as folder:
        seconds = [{form: run(form, args, Path(folder)) for form in FORMS} for _ in range(args.pairs)]
    ratios = {form: [round(pair[form] / pair["ours"], 3) for pair in seconds] for form in FORMS[1:]}
    result = {
        **{name: value for name, value in vars(args).items() if name not in ("out", "measure")},
        "torch": torch.__version__,
        "seconds_a_step": seconds,
        "throughput_to": {
            form: {"median": statistics.median(values), "pairs": values} for form, values in ratios.items()
        },
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def run(form: str, args: argparse.Namespace, folder: Path) -> float:
    """Runs one form in a process of its own, and returns the median seconds per step."""
    sections: dict[str, Any] = {
        "model": {"path": args.model, "dtype": args.dtype},
        "ttt": {"layers": "every:6", "chunk_size": 128},
        "data": {"train": args.text, "sequence_length": args.length, "cache": f"{folder}/cache"},
        "training": {"steps": args.steps, "learning_rate": 1e-5},
        "monitor": {"logging_steps": 10, "save_steps": 1000},
        "audit": {"enabled": False},
        "deepspeed": {
            "zero_optimization": {
                "stage": args.stage,
                "reduce_bucket_size": 5_000_000,
                "allgather_bucket_size": 5_000_000,
            }
        },
        "output": f"{folder}/out",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, __file__, "--measure", form, str(folder / "recipe.yaml")]
    done = subprocess.run(command, env={**os.environ, **meeting}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return float(done.stdout.rpartition("SECONDS ")[2])


def measure(form: str, file: str) -> float:
    """Returns the median seconds between the ends of two steps.

    On one CPU thread these are seconds of processor time, which other processes do not lengthen.
    """
    import torch
    from transformers import TrainerCallback

    from inplace_ttt.training.loop.run_state import agree
    from inplace_ttt.training.recipe.recipe import load_recipe
    from inplace_ttt.training.run.worker import meet, prepare

    clock = (
        time.process_time
        if not torch.cuda.is_available() and torch.get_num_threads() == 1
        else time.perf_counter
    )
    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(clock())
            control.should_save = False

    recipe = load_recipe(file)
    if form == "ours":
        meeting = meet(recipe)
        trainer = prepare(
            recipe, meeting, agree(recipe, meeting, resume=False), resume=False, audit=False
        ).trainer
    else:
        trainer = plain(recipe, converted=form == "trainer")
    trainer.add_callback(Ends())
    trainer._save_checkpoint = lambda *args, **kwargs: None  # type: ignore[method-assign]
    trainer.train()
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def plain(recipe: Any, converted: bool) -> Any:
    """Returns transformers' Trainer on the rows of the recipe."""
    from transformers import AutoTokenizer, Trainer

    from inplace_ttt.surgery import config_of, revert
    from inplace_ttt.training.data.data import build_data
    from inplace_ttt.training.data.row_order import rows_to_come
    from inplace_ttt.training.loop.arguments import open_group, training_arguments
    from inplace_ttt.training.loop.batches import collate
    from inplace_ttt.training.loop.meeting import Meeting
    from inplace_ttt.training.model import build_model

    meeting = Meeting.by_environment()
    open_group(meeting, recipe)
    settings = training_arguments(recipe)
    model = build_model(recipe)
    data = build_data(recipe, AutoTokenizer.from_pretrained(recipe.model.path), config_of(model).chunk_size)
    model = model if converted else revert(model)
    return Trainer(
        model=model, args=settings, train_dataset=rows_to_come(data.train, recipe), data_collator=collate
    )


if __name__ == "__main__":
    main()

"""Compares the memory that `plan` counts with the memory of real processes on a CPU.

    python tools/bench/bench_plan.py --model .cache/smollm2-135m --out plan.json

Each setting is a normal run through DeepSpeed. The peaks of its last training step and of the evaluation are
measured. A process also holds libraries, threads and communication buffers. They are measured in the same run
with a toy model, and subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ZERO = {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000, "overlap_comm": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32, every parameter, ZeRO 1": {"model": {"dtype": "float32"}, "deepspeed": 1},
    "bfloat16, every parameter recomputed, ZeRO 2 on two processes": {
        "training": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        "parallel": {"nproc_per_node": 2},
        "deepspeed": 2,
    },
    "bfloat16, conv and P alone, two rows, ZeRO 0": {
        "training": {"trainable": "ttt", "batch_size": 2},
        "deepspeed": 0,
    },
    "float32, every parameter recomputed, ZeRO 3 on two processes": {
        "model": {"dtype": "float32"},
        "training": {"gradient_checkpointing": True},
        "parallel": {"nproc_per_node": 2},
        "deepspeed": 3,
    },
    "bfloat16, LoRA, rows of 2,048, ZeRO 2": {
        "training": {"trainable": "lora", "lora": {"rank": 8}},
        "data": {"sequence_length": 2048},
        "deepspeed": 2,
    },
}
TOY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
"""Sizes of the toy model. It has as many layers and tokens as the measured model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2-135m")
    parser.add_argument(
        "--text", nargs=2, default=[f".cache/text/shakespeare/{play}.txt" for play in ("hamlet", "macbeth")]
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="only settings with this text in their name")
    parser.add_argument("--measure", metavar="RECIPE", help="run as one process of a measured run")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    rows = [compare(name, values, args) for name, values in SETTINGS.items() if args.only in name]
    import torch

    result = {"model": args.model, "torch": torch.__version__, "rows": rows}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def compare(name: str, values: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Returns planned and measured bytes of one process, and their ratios."""
    planned, measured = zip(*(peaks(values, args, toy) for toy in (False, True)), strict=True)
    row: dict[str, Any] = {"setting": name}
    for what in ("training", "evaluation"):
        besides = measured[1][what] - planned[1][what]
        found = measured[0][what] - besides
        row[what] = {
            "planned": planned[0][what],
            "measured": found,
            "ratio": round(planned[0][what] / found, 3),
            "besides": besides,
        }
    print(json.dumps(row), file=sys.stderr)
    return row


def peaks(
    values: dict[str, Any], args: argparse.Namespace, toy: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns planned and measured peaks in bytes, of a run with the model or with the toy.

    The measured peaks are those of the process with the highest ones.
    """
    from inplace_ttt.training.plan.plan import make_plan
    from inplace_ttt.training.recipe.recipe import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        sections: dict[str, Any] = {
            "model": {"path": args.model, "dtype": "bfloat16"},
            "ttt": {"layers": [12, 18, 24], "chunk_size": 128},
            "data": {
                "train": args.text[0],
                "validation": args.text[1],
                "sequence_length": 1024,
                "cache": f"{folder}/cache",
            },
            "training": {"steps": 3, "learning_rate": 1e-5},
            "monitor": {"logging_steps": 100, "save_steps": 100, "evaluate_rows": 4},
            "audit": {"enabled": False},
            "output": f"{folder}/out",
        }
        for section, changes in values.items():
            known = sections.get(section, {})
            sections[section] = (
                {**known, **changes}
                if isinstance(changes, dict)
                else {"zero_optimization": {"stage": changes, **ZERO}}
            )
        if toy:
            sections["model"] = {**sections["model"], "path": None, "config": TOY, "tokenizer": args.model}
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump(sections))
        recipe = load_recipe(file)
        plan = make_plan(recipe)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        world = recipe.parallel.world
        kept = {
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        runs = [
            subprocess.Popen(
                [sys.executable, __file__, "--measure", str(file)],
                env={**os.environ, **kept, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]
        lines = [run.communicate()[0].rpartition("PEAKS ")[2] for run in runs]
        found = [json.loads(line) for line in lines]
    most = {what: max(one[what] for one in found) for what in ("training", "evaluation")}
    return {"training": plan.per_device_bytes["total"], "evaluation": plan.evaluation_bytes}, most


def measure(file: str) -> None:
    """Runs one process of a training run, up to the end of the evaluation after its last step."""
    from transformers import TrainerCallback

    from inplace_ttt.ops.benchmark import memory_status, peak_starts_again
    from inplace_ttt.training.loop.run_state import agree
    from inplace_ttt.training.recipe.recipe import load_recipe
    from inplace_ttt.training.run.worker import meet, prepare

    class LastStep(TrainerCallback):
        peak = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            peak_starts_again()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            LastStep.peak = memory_status("VmHWM")
            control.should_save = False

    recipe = load_recipe(file)
    meeting = meet(recipe)
    ready = prepare(recipe, meeting, agree(recipe, meeting, resume=False), resume=False, audit=False)
    ready.trainer.add_callback(LastStep())
    ready.trainer._save_checkpoint = lambda *args, **kwargs: None
    ready.trainer.train()
    peak_starts_again()
    ready.trainer.evaluate()
    print("PEAKS", json.dumps({"training": LastStep.peak, "evaluation": memory_status("VmHWM")}))


if __name__ == "__main__":
    main()

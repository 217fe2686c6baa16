"""Kills and signals small training runs at random moments, and checks that each resumes exactly.

    python tools/endurance/kill_runs.py --kills 100 --out docs/results/cpu-2026-11/kills.json
    python tools/endurance/kill_runs.py --signals 20 --out docs/results/cpu-2026-11/signals.json
    python tools/endurance/kill_runs.py --signals 10 --only SIGUSR1 SIGHUP \\
        --out docs/results/cpu-2026-11/signals-schedulers.json

A resumed run must end bit-equal to the unbroken run, and no process may be left. A kill (-9) ends one of two
processes or both. They are forked from a process that has imported everything, so a start is quick. A signal
goes to the real command, or to its process group, at any moment.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from safetensors.torch import load_file

from inplace_ttt.files.results import Results

SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL", "SIGUSR1", "SIGHUP")
RECIPE: dict[str, Any] = {
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_dropout": 0.1,  # makes the generators' states matter
        },
        "dtype": "float32",
    },
    "ttt": {"layers": [0], "chunk_size": 16},
    "data": {
        "recall": {"pairs": 4, "vocabulary": 64, "rows": 64},
        "sequence_length": 64,
        "validation_documents": 4,
    },
    "training": {"steps": 40, "learning_rate": 1e-3, "warmup_steps": 2, "eta_warmup_steps": 8},
    "parallel": {"nproc_per_node": 2},
    "monitor": {"logging_steps": 1, "save_steps": 3, "save_total_limit": 2},
    "audit": {"enabled": False},
}
_CONTEXT = multiprocessing.get_context("forkserver")
_STAY = 15.0
"""Seconds after which no child of an ended launcher may be left. A child that still imports takes ten."""


class Run:
    """The two processes of one start of a run."""

    def __init__(self, recipe: Path, output: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        self.processes = [
            _CONTEXT.Process(
                target=_train,
                args=({**meeting, "RANK": rank, "LOCAL_RANK": rank}, str(recipe), str(output)),
                daemon=True,
            )
            for rank in "01"
        ]
        for process in self.processes:
            process.start()

    def end(self) -> None:
        """Ends both processes, as a launcher does when one of them ends."""
        for process in self.processes:
            process.kill()
            process.join()
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self.port}_*"):
            left.unlink(missing_ok=True)

    def is_running(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def finish(self) -> list[int | None]:
        """Waits for both processes, and returns their exit codes."""
        while all(p.exitcode in (None, 0) for p in self.processes) and self.is_running():
            time.sleep(0.02)
        time.sleep(0.5 if any(p.exitcode for p in self.processes) else 0)
        codes = [process.exitcode for process in self.processes]
        self.end()
        return codes


def _train(environment: dict[str, str], recipe: str, output: str) -> None:
    os.environ.update(environment)
    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from inplace_ttt.training.__main__ import main

    sys.argv[1:] = [recipe, "--set", f"output={output}"]
    sys.exit(main())


def kill_series(seed: int, recipe: Path, output: Path, whole: str, seconds: float) -> dict[str, Any]:
    """Kills a run at a moment drawn by the seed, then starts it again and lets it end.

    One kill of five is drawn by time, and mostly hits a process that prepares. The others are drawn by the
    line of the log. So they spread over steps, saves and the end, on a machine of any speed.
    """
    draw = random.Random(seed)
    victims, pause, wait = draw.choice(([0], [1], [0, 1])), draw.uniform(0, 0.3), draw.uniform(0, seconds)
    run, log, started = Run(recipe, output), output / "log.jsonl", time.monotonic()
    if draw.random() < 0.8:
        lines, wait = draw.randint(1, RECIPE["training"]["steps"] + 2), draw.uniform(0, 0.1)
        while run.is_running() and (not log.exists() or log.read_text().count("\n") < lines):
            time.sleep(0.002)
    time.sleep(wait)
    wait = time.monotonic() - started
    for victim in victims:
        run.processes[victim].kill()
    time.sleep(pause)
    run.end()
    where = state(output)
    codes = Run(recipe, output).finish()
    return {
        "seed": seed,
        "after": round(wait, 3),
        "killed": victims,
        "found": where,
        "codes": codes,
        "same": digest(output) == whole,
    }


def signal_series(
    seed: int, recipe: Path, output: Path, whole: str, seconds: float, names: Sequence[str] = SIGNALS
) -> dict[str, Any]:
    """Signals the command or its process group, then starts the run again and lets it end."""
    draw = random.Random(seed)
    number, group = signal.Signals[draw.choice(names)], draw.random() < 0.5
    command = [sys.executable, "-m", "inplace_ttt.cli", "train", str(recipe), "--set", f"output={output}"]
    with open(f"{output}.log", "ab") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    started, wait = time.monotonic(), draw.uniform(0, seconds)
    # half of the signals come after the first checkpoint; the others at any moment, mostly during imports
    if draw.random() < 0.5:
        wait = draw.uniform(0, 3)
        while not has_checkpoint(output) and launcher.poll() is None:
            time.sleep(0.02)
    time.sleep(wait)
    wait = time.monotonic() - started
    running = launcher.poll() is None
    if running:
        (os.killpg if group else os.kill)(launcher.pid, number)
    try:
        code = launcher.wait(120)
    except subprocess.TimeoutExpired:  # the report counts it as a process that is left
        code = None
    until, left = time.monotonic() + _STAY, of_run(output)
    began = time.monotonic()
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = of_run(output)
    stayed, where = round(time.monotonic() - began, 1), state(output)
    codes = Run(recipe, output).finish()
    said = {"signal": number.name, "to": "group" if group else "process", "running": running, "code": code}
    same = digest(output) == whole
    return {
        "seed": seed,
        "after": round(wait, 3),
        **said,
        "left": len(left),
        "stayed": stayed,
        "found": where,
        "codes": codes,
        "same": same,
    }


def of_run(output: Path) -> list[int]:
    """Returns the ids of the processes with the output folder in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and f"output={output}" in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def state(output: Path) -> str:
    """Returns the state of the output folder that the next start will find."""
    if (output / "train_report.json").exists():
        return "finished"
    steps = [int(mark.parent.name.rpartition("-")[2]) for mark in output.glob("checkpoint-*/complete")]
    unfinished = any((output / ".saving").glob("checkpoint-*"))
    last = (
        "no checkpoint"
        if not steps
        else "all steps"
        if max(steps) == RECIPE["training"]["steps"]
        else "a checkpoint"
    )
    return f"{last}, and one half written" if unfinished else last


def has_checkpoint(output: Path) -> bool:
    return any(output.glob("checkpoint-*/complete"))


def digest(output: Path) -> str | None:
    """Returns a digest of the trained model's tensors and of the losses of all steps.

    Returns None if the run has no report.
    """
    if not (output / "train_report.json").exists():
        return None
    total = hashlib.sha256()
    for name, tensor in sorted(load_file(output / "final" / "model.safetensors").items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    total.update(repr([(line["step"], line["loss"]) for line in lines if "loss" in line]).encode())
    return total.hexdigest()


def report(results: dict[str, list[dict[str, Any]]], seconds: int) -> dict[str, Any]:
    """Returns the report on all series so far."""
    about: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "seconds": seconds, "recipe": RECIPE}
    for kind, runs in results.items():
        ended = {
            "series": len(runs),
            "bit_equal": sum(run["same"] for run in runs),
            "found": dict(Counter(run["found"] for run in runs)),
        }
        about[kind] = {**ended, "processes_left": sum(run.get("left", 0) for run in runs), "runs": runs}
    return about


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--signals", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", choices=SIGNALS, default=SIGNALS, help="the signals to choose from"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no series after this time")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    # a shell's background job and its children would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _CONTEXT.set_forkserver_preload(
        [
            "inplace_ttt.training.run.worker",
            "accelerate.utils.deepspeed",
            "datasets",
            "transformers.models.llama",
        ]
    )
    began, results, kept = time.monotonic(), {"kills": [], "signals": []}, Results(options.out.parent)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        recipe = here / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({**RECIPE, "output": str(here / "whole")}))
        for name in ("first", "whole"):  # the first start imports, and compiles DeepSpeed's operator
            start = time.monotonic()
            assert Run(recipe, here / name).finish() == [0, 0], (here / f"{name}.log").read_text()[-3000:]
        one_start, whole = time.monotonic() - start, digest(here / "whole")
        assert whole is not None and whole == digest(here / "first")
        start = time.monotonic()
        if options.signals:
            line = [
                sys.executable,
                "-m",
                "inplace_ttt.cli",
                "train",
                str(recipe),
                "--set",
                f"output={here}/command",
            ]
            subprocess.run(line, check=True, capture_output=True)
        one_command = time.monotonic() - start
        for kind, count, series, length in (
            ("kills", options.kills, kill_series, one_start),
            ("signals", options.signals, functools.partial(signal_series, names=options.only), one_command),
        ):
            for number in range(count):
                if time.monotonic() - began > 60 * options.minutes:
                    break
                output = here / f"{kind}-{number}"
                results[kind].append(series(options.seed + number, recipe, output, whole, length))
                print(json.dumps(results[kind][-1]), flush=True)
                kept.put(options.out.stem, report(results, round(time.monotonic() - began)))
                if not results[kind][-1]["same"]:
                    print(Path(f"{output}.log").read_text()[-3000:], file=sys.stderr)
                shutil.rmtree(output, ignore_errors=True)
    return 0 if all(run["same"] and not run.get("left") for runs in results.values() for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())

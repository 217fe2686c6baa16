"""Checks the kernels on a GPU, then measures them and whole models, and prints a short table.

Run it through tools/gpu/gpu_check.sh. After a failed check the measurements continue, and their table is
marked as wrong. The table names measurements that were skipped for lack of time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_COMPILED = (512, 4096)
"""Chunk sizes at which the formulations under torch.compile are measured too."""


class Clock:
    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.skipped: list[str] = []

    def has(self, seconds: float, task: str) -> bool:
        """Returns True if so many seconds are left, else notes the task as skipped."""
        left = self.end - time.monotonic()
        if left < seconds:
            self.skipped.append(f"{task}: needs about {seconds:.0f} s, {max(left, 0):.0f} s left")
        return left >= seconds

    @contextlib.contextmanager
    def carries_on(self, task: str) -> Iterator[None]:
        """Notes a task that raises, so that the others are still measured."""
        try:
            yield
        except Exception as error:
            self.skipped.append(f"{task}: {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.5, help="minutes to use (default: 8.5)")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on the CPU, through Triton's interpreter"
    )
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not args.smoke and not torch.cuda.is_available():
        print(
            "torch finds no CUDA GPU on this machine; --smoke runs everything in tiny sizes on the CPU.",
            file=sys.stderr,
        )
        return 2
    folder = Path(os.environ.get("OUT") or "gpu-check")
    folder.mkdir(parents=True, exist_ok=True)
    clock, about = Clock(args.minutes), _about(args)
    table = [
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}, transformers {about['transformers']}"
    ]

    import bench_kernels
    import check_kernels
    import situations

    device, say = "cpu" if args.smoke else "cuda", _say
    rows = _all(check_kernels.on_all_cores(device, args.smoke), situations.checks(args.smoke))
    checks = _record(folder / "checks.json", about, rows, _say_check)
    wrong = [row["name"] for row in checks if not row["ok"]]
    about["wrong"] = wrong  # every file has it beside the figures
    table.append(f"{len(checks) - len(wrong)} of {len(checks)} checks hold")
    table += [f"wrong: {name}" for name in wrong]
    if wrong:
        table.append("THE KERNELS ARE WRONG HERE: the figures below are times of wrong results.")

    with clock.carries_on("everything that is timed"):
        limits = _record(folder / "ceilings.json", about, bench_kernels.ceilings(args.smoke), say)
        rate = next(row["tflops"] for row in limits if row["name"] == "product")
        copy = next(row["terabytes_per_second"] for row in limits if row["name"] == "copy")
        table.append(f"ceilings: {rate:.0f} TFLOP/s in bf16 products, {copy:.2f} TB/s copied")
        # first the bars (a model of each rule, the first op shapes), then the others while time is left
        shapes, tasks = list(_shapes(args.smoke)), list(_model_tasks(args.smoke))
        models = _record(folder / "models.json", about, _models(tasks[:4], clock), say)
        ops = _record(folder / "op.json", about, _ops(shapes[:5], clock, args.smoke), say)
        _record(folder / "kernels.json", about, _alone(clock, args.smoke), say)
        models = _record(folder / "models.json", about, _models(tasks[4:], clock), say, models)
        others = _record(folder / "situations.json", about, _situations(clock, args.smoke), say)
        ops = _record(folder / "op.json", about, _ops(shapes[5:], clock, args.smoke), say, ops)
        table += [*_op_table(ops, rate), *_situation_table(others), *_model_table(models)]
    _record(folder / "tiles.json", about, _tiles(), say)
    if not args.smoke and clock.has(situations.SANITIZER_SECONDS, "compute-sanitizer"):
        found = _record(folder / "checks.json", about, situations.sanitizer(), _say_check, checks)[
            len(checks) :
        ]
        table += [f"{'holds' if row['ok'] else 'wrong'}: {row['name']} {row['where']}" for row in found]
        wrong += [row["name"] for row in found if not row["ok"]]
    print("\n".join([*table, *(f"skipped: {line}" for line in clock.skipped)]))
    return 1 if wrong else 0


def _about(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers
    import triton

    return {
        "command": " ".join(["tools/gpu/gpu_check.sh", *sys.argv[1:]]),
        "device": f"{platform.machine()} CPU, interpreted" if args.smoke else torch.cuda.get_device_name(),
        "driver_cuda": torch.version.cuda, "torch": torch.__version__, "triton": triton.__version__,
        "transformers": transformers.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _all(*parts: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for part in parts:
        yield from part


def _record(
    file: Path,
    about: dict[str, Any],
    rows: Iterable[dict[str, Any]],
    say: Callable[[dict[str, Any]], None],
    earlier: Iterable[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Prints each row and writes it to disk at once, so that an interrupted run keeps its rows."""
    done = [*earlier]
    for row in rows:
        done.append({**row, "clocks": _clocks()})
        say(row)
        file.write_text(
            json.dumps({**about, "rows": done}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return done


def _clocks() -> dict[str, float] | None:
    """Returns the GPU's clocks in MHz, power in W and temperature in °C; None without nvidia-smi."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        return {name: float(value) for name, value in zip(fields, said.split(","), strict=True)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _say_check(row: dict[str, Any]) -> None:
    if not row["ok"]:
        print(
            f"FAIL {row['name']}: {row['where']} is {row['worst']:.1e} off, {row['bound']:.0e} allowed",
            flush=True,
        )


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row, ensure_ascii=False), flush=True)


def _shapes(smoke: bool) -> Iterable[tuple[str, Any]]:
    from inplace_ttt.ops import benchmark

    return [("tiny", benchmark.Shape(40, 72, 128, 32))] if smoke else benchmark.registry()


def _ops(shapes: list[tuple[str, Any]], clock: Clock, smoke: bool) -> Iterable[dict[str, Any]]:
    import torch

    from inplace_ttt.ops import benchmark

    for model, shape in shapes:
        # about 30 runs of some ten products each, and what compiling and tuning takes
        seconds = 25 + 400 * shape.product / 400e12
        if smoke:
            yield {
                "model": model,
                **vars(shape),
                "rows": benchmark.measure(shape, 1, "cpu", torch.bfloat16, every_form=False),
            }
        elif clock.has(
            seconds, task := f"op at {model}, {shape.tokens} tokens, chunks of {shape.chunk_size}"
        ):
            every_form = shape.chunk_size in _COMPILED  # compiling would take most of the time
            with clock.carries_on(task):
                yield {
                    "model": model,
                    **vars(shape),
                    "rows": benchmark.measure(shape, 5, "cuda", torch.bfloat16, every_form),
                }
            torch.cuda.empty_cache()


def _model_tasks(smoke: bool) -> Iterable[tuple[dict[str, Any], float]]:
    """Yields measurements of converted models, each with its approximate seconds."""
    if smoke:
        yield (
            {
                "shape": "tiny",
                "tokens": 96,
                "chunk_size": 32,
                "repeats": 1,
                "device": "cpu",
                "dtype": "bfloat16",
            },
            0,
        )
        return
    long, short = 32768, 8192
    uncached = ("prefill", "training step")  # a cache breaks the graph of a compiled model
    for shape, tokens, changed, seconds in (
        ("Qwen3-4B", long, {"preset": "paper"}, 45),
        ("Qwen3-4B", long, {"preset": "ridge"}, 45),
        ("Qwen3-4B", long, {"preset": "ridge", "chunk_size": 128, "steps": uncached}, 45),
        ("SmolLM2-135M", short, {"preset": "ridge"}, 30),
        *(
            ("Qwen3-4B", long, {"preset": "paper", "compiled": mode, "steps": uncached}, 90)
            for mode in ("default", "reduce-overhead")
        ),
        ("SmolLM2-135M", long, {"preset": "paper"}, 45),
        ("Qwen3-4B", short, {"preset": "paper"}, 20),
        ("SmolLM2-135M", short, {"preset": "paper"}, 20),
    ):
        settings = {
            "shape": shape,
            "tokens": tokens,
            "chunk_size": 512,
            "repeats": 5,
            "device": "cuda",
            "dtype": "bfloat16",
        }
        yield {**settings, **changed}, seconds


def _models(tasks: list[tuple[dict[str, Any], float]], clock: Clock) -> Iterable[dict[str, Any]]:
    import torch
    from bench_converted import measure

    for settings, seconds in tasks:
        task = _model_name(settings)
        if not seconds or clock.has(seconds, task):
            with clock.carries_on(task):
                yield measure(**settings)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _model_name(settings: dict[str, Any]) -> str:
    compiled = f", compiled ({settings['compiled']})" if settings.get("compiled") else ""
    return f"{settings['shape']} {settings['tokens']} tokens, {settings.get('preset', 'paper')}, C {settings['chunk_size']}{compiled}"


def _situations(clock: Clock, smoke: bool) -> Iterable[dict[str, Any]]:
    import situations
    import torch

    for name, seconds, measure in situations.times(smoke, 1 if smoke else 5):
        if smoke or clock.has(seconds, name):
            with clock.carries_on(name):
                yield {"name": name, **measure()}
            if not smoke:
                torch.cuda.empty_cache()


def _alone(clock: Clock, smoke: bool) -> Iterable[dict[str, Any]]:
    import bench_kernels

    if smoke or clock.has(60, "each kernel alone"):
        with clock.carries_on("each kernel alone"):
            yield from bench_kernels.kernels(smoke)


def _tiles() -> Iterable[dict[str, Any]]:
    """Yields the tile that each kernel chose for each problem, with the milliseconds of all candidates."""
    from inplace_ttt.kernels import tuning

    for key, tile in tuning._chosen.items():
        kernel, *problem = key
        took = [
            {**vars(candidate), "milliseconds": time} for candidate, time in tuning.timed.get(key, {}).items()
        ]
        yield {"kernel": kernel, "problem": " ".join(map(str, problem)), **vars(tile), "timed": took}


def _op_table(results: list[dict[str, Any]], rate: float) -> list[str]:
    head = f"{'op, forward + backward':38}{'ms':>9}{'of rate':>9}{'x linear':>9}{'mater.':>8}{'compiled':>9}{'chunked':>8}{'W0 copies':>10}"
    lines = [head] if results else []
    for result in results:
        rows = {row["name"]: row for row in result["rows"]}
        mine = rows["fast_weight"]
        name = f"{result['model']} T {result['tokens']} C {result['chunk_size']}"
        if "out_of_memory" in mine:
            lines.append(f"{name:38} out of memory")
            continue
        taken = mine["seconds"]["median"]

        def faster(form: str, rows: dict[str, Any] = rows, taken: float = taken) -> str:
            if form not in rows:
                return "-"
            return (
                "oom" if "out_of_memory" in rows[form] else f"{rows[form]['seconds']['median'] / taken:.2f}"
            )

        copies = mine["extra_peak_bytes"] / (4 * result["d"] * result["h"])
        lines.append(
            f"{name:38}{taken * 1e3:9.2f}{mine['tflops_of_7_products'] / rate:9.2f}{mine['ratio_to_linear']['median']:9.2f}"
            f"{faster('materializing'):>8}{faster('materializing, compiled'):>9}{faster('chunked'):>8}{copies:10.1f}"
        )
    return lines


def _situation_table(results: list[dict[str, Any]]) -> list[str]:
    return [
        f"{result['name']}: {result['median']:.2f} ({result['min']:.2f}-{result['max']:.2f}) of the plain linear's time"
        for result in results
    ]


def _model_table(results: list[dict[str, Any]]) -> list[str]:
    return [
        f"{_model_name(result)}, {name}: "
        + (
            "out of memory"
            if "out_of_memory" in row
            else f"{row['median']:.3f} ({row['min']:.3f}-{row['max']:.3f}) of the base's time"
        )
        for result in results
        for name, row in result["ratio_to_base"].items()
    ]


if __name__ == "__main__":
    sys.exit(main())

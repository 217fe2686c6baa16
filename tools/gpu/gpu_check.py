"""Checks the kernels on a GPU, then measures them and whole models, and prints a short table.

    tools/gpu/gpu_check.sh [--minutes 8.5] [--only WORD ...] [--list] [--smoke]

Results are in $OUT or gpu-check. The same command resumes: a task that is done is not repeated. After a failed
check the measurements continue, and their table is marked as wrong. The table names the tasks that did not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from runner import Rows, Run, Task

_COMPILED = (512, 4096)
"""Chunk sizes at which the formulations under torch.compile are measured too."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="minutes to use (default: 8.5)")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORD",
        help="only tasks with one of these words in their name",
    )
    parser.add_argument("--list", action="store_true", help="print the tasks in order, and measure nothing")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes on the CPU, through Triton's interpreter"
    )
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not (args.smoke or args.list) and not torch.cuda.is_available():
        print(
            "torch finds no CUDA GPU on this machine; --smoke runs everything in tiny sizes on the CPU.",
            file=sys.stderr,
        )
        return 2
    folder = Path(os.environ.get("OUT") or "gpu-check")
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, _about(args), args.minutes, args.only)
    if args.list:
        for task in _tasks(args.smoke):
            print(f"{task.seconds:5.0f} s  {task.file}: {task.name}{', done' * run.is_done(task)}")
        return 0
    run.do(_checks(args.smoke))
    wrong = [row["name"] for row in run.rows("checks") if not row["ok"]]
    run.about["wrong"] = wrong  # every file has it beside the figures
    run.do(_tasks(args.smoke))
    wrong = [row["name"] for row in run.rows("checks") if not row["ok"]]
    print("\n".join([*_table(run, wrong), *(f"skipped: {line}" for line in run.skipped)]))
    return 1 if wrong else 0


def _table(run: Run, wrong: list[str]) -> list[str]:
    about, checks = run.about, run.rows("checks")
    table = [
        f"{about['device']}, torch {about['torch']}, triton {about['triton']}, transformers {about['transformers']}",
        f"{len(checks) - len(wrong)} of {len(checks)} checks hold",
        *(f"wrong: {name}" for name in wrong),
    ]
    if wrong:
        table.append("THE KERNELS ARE WRONG HERE: the figures below are times of wrong results.")
    limits = {row["name"]: row for row in run.rows("ceilings")}
    if {"product", "copy"} <= limits.keys():
        rate = limits["product"]["tflops"]
        copied = limits["copy"]["terabytes_per_second"]
        table.append(f"ceilings: {rate:.0f} TFLOP/s in bf16 products, {copied:.2f} TB/s copied")
        table += _op_table(run.rows("op"), rate)
    return [*table, *_situation_table(run.rows("situations")), *_model_table(run.rows("models"))]


def _checks(smoke: bool) -> Iterator[Task]:
    """Yields the checks, which run before anything is timed."""
    import check_kernels
    import situations

    device = "cpu" if smoke else "cuda"
    yield Task(
        "checks", "kernels", 0 if smoke else 60, lambda: check_kernels.on_all_cores(device, smoke), _failure
    )
    yield Task("checks", "situations", 0 if smoke else 30, lambda: situations.checks(smoke), _failure)


def _tasks(smoke: bool) -> Iterator[Task]:
    """Yields all tasks, the most important figures first."""
    import bench_kernels
    import situations

    yield from _checks(smoke)
    yield Task("ceilings", "ceilings", 0 if smoke else 10, lambda: bench_kernels.ceilings(smoke))
    shapes, models = list(_shapes(smoke)), list(_models(smoke))
    # first the bars (a model of each rule, the first op shapes), then the others
    yield from models[:4]
    yield from (_op(*shape, smoke) for shape in shapes[:5])
    yield Task("kernels", "each kernel alone", 0 if smoke else 60, lambda: bench_kernels.kernels(smoke))
    yield from models[4:]
    for name, seconds, measure in situations.times(smoke, 1 if smoke else 5):
        yield Task("situations", name, 0 if smoke else seconds, partial(_named, name, measure))
    yield from (_op(*shape, smoke) for shape in shapes[5:])
    # each run's own
    yield Task("tiles", f"tiles at {time.strftime('%Y-%m-%d %H:%M:%S')}", 0, _tiles)
    if not smoke:
        yield Task(
            "checks", "compute-sanitizer", situations.SANITIZER_SECONDS, situations.sanitizer, _failure
        )


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


def _failure(row: dict[str, Any]) -> str | None:
    if row["ok"]:
        return None
    return f"FAIL {row['name']}: {row['where']} is {row['worst']:.1e} off, {row['bound']:.0e} allowed"


def _named(name: str, measure: Callable[[], dict[str, Any]]) -> Rows:
    yield {"name": name, **measure()}
    _let_go()


def _let_go() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _shapes(smoke: bool) -> Iterable[tuple[str, Any]]:
    from inplace_ttt.ops import benchmark

    return [("tiny", benchmark.Shape(40, 72, 128, 32))] if smoke else benchmark.registry()


def _op(model: str, shape: Any, smoke: bool) -> Task:
    # the op runs about 30 times, each with ten products, and first compiles and tunes its kernels
    seconds = 0 if smoke else 25 + 400 * shape.product / 400e12
    name = f"op at {model}, {shape.tokens} tokens, chunks of {shape.chunk_size}"
    return Task("op", name, seconds, partial(_measure_op, model, shape, smoke))


def _measure_op(model: str, shape: Any, smoke: bool) -> Rows:
    import torch

    from inplace_ttt.ops import benchmark

    every_form = not smoke and shape.chunk_size in _COMPILED  # compiling would take most of the time
    rows = benchmark.measure(
        shape, 1 if smoke else 5, "cpu" if smoke else "cuda", torch.bfloat16, every_form=every_form
    )
    yield {"model": model, **vars(shape), "rows": rows}
    _let_go()


def _models(smoke: bool) -> Iterator[Task]:
    """Yields the measurements of converted models."""
    settings = {"chunk_size": 512, "repeats": 5, "device": "cuda", "dtype": "bfloat16"}
    if smoke:
        tiny = {"shape": "tiny", "tokens": 96, "chunk_size": 32, "repeats": 1, "device": "cpu"}
        yield _model({**settings, **tiny}, 0)
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
        yield _model({**settings, "shape": shape, "tokens": tokens, **changed}, seconds)


def _model(settings: dict[str, Any], seconds: float) -> Task:
    return Task("models", _model_name(settings), seconds, partial(_measure_model, settings))


def _measure_model(settings: dict[str, Any]) -> Rows:
    from bench_converted import measure

    yield measure(**settings)
    _let_go()


def _model_name(settings: dict[str, Any]) -> str:
    compiled = f", compiled ({settings['compiled']})" if settings.get("compiled") else ""
    return f"{settings['shape']} {settings['tokens']} tokens, {settings.get('preset', 'paper')}, C {settings['chunk_size']}{compiled}"


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

"""One call on a machine with a GPU: the kernels are right, how fast they are, what a whole model pays; a short table last.

Nothing is timed when a check fails. What the time does not suffice for is named. Run it through tools/gpu/gpu_check.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


class Clock:
    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.skipped: list[str] = []

    def has(self, seconds: float, task: str) -> bool:
        """Whether so much time is left; notes the task if not."""
        left = self.end - time.monotonic()
        if left < seconds:
            self.skipped.append(f"{task}: needs about {seconds:.0f} s, {max(left, 0):.0f} s left")
        return left >= seconds

    @contextlib.contextmanager
    def carries_on(self, task: str) -> Iterator[None]:
        """Note a task that breaks, so that the rest is still measured."""
        try:
            yield
        except Exception as error:
            self.skipped.append(f"{task}: {type(error).__name__}: {str(error)[:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.5, help="the time there is (default: 8.5)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, through Triton's interpreter")
    args = parser.parse_args()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not args.smoke and not torch.cuda.is_available():
        print("this machine has no CUDA GPU that torch can use; --smoke runs everything in tiny on the CPU.", file=sys.stderr)
        return 2
    folder = Path(os.environ.get("OUT") or "gpu-check")
    folder.mkdir(parents=True, exist_ok=True)
    clock, about = Clock(args.minutes), _about(args)
    table = [f"{about['device']}, torch {about['torch']}, triton {about['triton']}, transformers {about['transformers']}"]

    import check_kernels

    device = "cpu" if args.smoke else "cuda"
    checks = _record(folder / "checks.json", about, check_kernels.checks(device, args.smoke), _say_check)
    wrong = [row["name"] for row in checks if not row["ok"]]
    table.append(f"{len(checks) - len(wrong)} of {len(checks)} checks hold")
    if wrong:
        print("\n".join([*table, *(f"wrong: {name}" for name in wrong), "nothing was timed: a wrong kernel has no speed."]))
        return 1

    import bench_kernels

    alone = _record(folder / "kernels.json", about, _all(bench_kernels.ceilings(args.smoke), bench_kernels.kernels(args.smoke)), _say)
    rate = next(row["tflops"] for row in alone if row["name"] == "product")
    copy = next(row["terabytes_per_second"] for row in alone if row["name"] == "copy")
    table.append(f"ceilings: {rate:.0f} TFLOP/s in bf16 products, {copy:.2f} TB/s copied")
    # the first op shapes, the models, then the rest of the shapes for as long as the time lasts
    shapes = list(_shapes(args.smoke))
    first = _record(folder / "op.json", about, _ops(shapes[:4], clock, args.smoke), _say)
    models = _record(folder / "models.json", about, _models(clock, args.smoke), _say)
    ops = _record(folder / "op.json", about, _ops(shapes[4:], clock, args.smoke), _say, first)
    _record(folder / "tiles.json", about, _tiles(), _say)
    print("\n".join([*table, *_op_table(ops, rate), *_model_table(models), *(f"skipped: {line}" for line in clock.skipped)]))
    return 0


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
    """Print the rows as they come and keep them on disk after each, so that a cut leaves what there was."""
    done = [*earlier]
    for row in rows:
        done.append(row)
        say(row)
        file.write_text(json.dumps({**about, "rows": done}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return done


def _say_check(row: dict[str, Any]) -> None:
    if not row["ok"]:
        print(f"FAIL {row['name']}: {row['where']} is {row['worst']:.1e} off, {row['bound']:.0e} allowed", flush=True)


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
            yield {"model": model, **vars(shape), "rows": benchmark.measure(shape, 1, "cpu", torch.bfloat16, every_form=False)}
        elif clock.has(seconds, task := f"op at {model}, {shape.tokens} tokens, chunks of {shape.chunk_size}"):
            with clock.carries_on(task):
                yield {"model": model, **vars(shape), "rows": benchmark.measure(shape, 5, "cuda", torch.bfloat16)}
            torch.cuda.empty_cache()


def _models(clock: Clock, smoke: bool) -> Iterable[dict[str, Any]]:
    import torch
    from bench_converted import measure

    if smoke:
        yield measure("tiny", 96, 32, 1, "cpu", "bfloat16")
        return
    both = ("Qwen3-4B", "SmolLM2-135M")
    for shape, tokens, seconds in [(shape, 32768, 45) for shape in both] + [(shape, 8192, 20) for shape in both]:
        if clock.has(seconds, task := f"model {shape} at {tokens} tokens"):
            with clock.carries_on(task):
                yield measure(shape, tokens, 512, 5, "cuda", "bfloat16")
            torch.cuda.empty_cache()


def _tiles() -> Iterable[dict[str, Any]]:
    """Which of its candidates each kernel took, and for what."""
    from inplace_ttt_kernels import tuning

    for (kernel, *problem), tile in tuning._chosen.items():
        yield {"kernel": kernel, "problem": " ".join(map(str, problem)), **vars(tile)}


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
            return "oom" if "out_of_memory" in rows[form] else f"{rows[form]['seconds']['median'] / taken:.2f}"

        copies = mine["extra_peak_bytes"] / (4 * result["d"] * result["h"])
        lines.append(
            f"{name:38}{taken * 1e3:9.2f}{mine['tflops_of_7_products'] / rate:9.2f}{mine['ratio_to_linear']['median']:9.2f}"
            f"{faster('materialising'):>8}{faster('materialising, compiled'):>9}{faster('chunked'):>8}{copies:10.1f}"
        )
    return lines


def _model_table(results: list[dict[str, Any]]) -> list[str]:
    return [
        f"{result['shape']} {result['tokens']} tokens, {name}: "
        + ("out of memory" if "out_of_memory" in row else f"{row['median']:.3f} ({row['min']:.3f}-{row['max']:.3f}) of the base's time")
        for result in results
        for name, row in result["ratio_to_base"].items()
    ]


if __name__ == "__main__":
    sys.exit(main())

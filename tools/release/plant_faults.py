"""Plants a fault in each part of the package, one at a time, and checks that the gate catches it.

    python tools/release/plant_faults.py [--only NAME ...] [--list]

Each fault is a change of one line in a copy of the checkout. Then its tests run, as `make test` runs them.
Exits with 1 if they pass. A fault takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A wrong line.

    Attributes:
        name: the fault in words.
        file: file of the package.
        right: the line in the package.
        wrong: the line that replaces it.
        tests: tests that must fail.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str


_LAWS, _SOLVED, _STREAM, _TRAINING = (
    "tests/laws/test_l1_reference.py",
    "tests/laws/test_l1_least_squares.py",
    "tests/laws/test_l2_streaming.py",
    "tests/training",
)

FAULTS = (
    Fault("chunks start at the row, not at the document", "layout.py",
          "for first in range(start, stop, self.chunk_size):", "for first in range(start // 2 * 2, stop, self.chunk_size):",
          "tests/test_layout.py"),
    Fault("an incomplete chunk writes", "layout.py", "return chunk[1] - chunk[0] == self.chunk_size", "return chunk[1] > chunk[0]", f"{_LAWS} tests/test_layout.py {_STREAM}"),
    Fault("a rank's own writes are in what it starts from", "layout.py",
          "links[row, reader, writer + 1] = writer < reader", "links[row, reader, writer + 1] = writer <= reader",
          "tests/laws/test_l8_ranks.py"),
    Fault("a document keeps the state of the one before it", "ops/chunked.py",
          "state = self.initial_state[row] if number == 0 and self.initial_state is not None else None",
          "state = self.initial_state[row] if self.initial_state is not None else None", _LAWS),
    Fault("the clip is left out of the backward", "ops/chunked.py",
          "return factor * (d_clipped - along * delta)", "return factor * d_clipped", _LAWS),
    Fault("G gets no gradient's other half", "ops/least_squares_walk.py",
          "product(keys, of_g) + product(keys, of_g.mT)", "2 * product(keys, of_g)", _SOLVED),
    Fault("λ is doubled", "ops/normal_equations.py", "clamp(min=ridge)", "clamp(min=2 * ridge)", _SOLVED),
    Fault("row norms are those of S", "ops/norms.py", "total = w0 + eta * state\n    return (row", "total = state\n    return (row",
          "tests/laws/test_l1_norms.py"),
    Fault("taps cross the chunk's border", "ops/conv.py",
          "inside = (chunk_ids[:, here] == chunk_ids[:, there]) & (chunk_ids[:, here] >= 0)", "inside = chunk_ids[:, here] >= 0",
          "tests/triton_kernels/test_conv.py tests/laws/test_l3_packed.py"),
    Fault("ranks get each other's slices", "ops/scan.py",
          "return self._slices(whole)[self.rank]", "return self._slices(whole)[self.rank - 1]", "tests/laws/test_l8_ranks.py"),
    Fault("a kernel's first column is taken for another", "kernels/walk_kernel.py",
          "rows, columns, deep = row + tl.arange(0, BD), column + tl.arange(0, BH), tl.arange(0, BK)",
          "rows, columns, deep = row + tl.arange(0, BD), column + 1 + tl.arange(0, BH), tl.arange(0, BK)",
          "tests/triton_kernels/test_fast_weight.py"),
    Fault("the target is not normalized", "layer/target.py",
          "((x - self.mean) * self.gain)", "(x * self.gain)", "tests/calibration/test_calibrate.py"),
    Fault("keys are not centered", "layer/whitened_keys.py", "value=-1)", "value=0)", "tests/calibration tests/test_target.py"),
    Fault("the gate ignores its bias", "layer/write_gate.py", "** 0.5 + bias)", "** 0.5)", "tests/test_write_gate.py"),
    Fault("a stream's chunk counts twice", "layer/rows.py",
          "self._put(row, after[0])\n        held.filled", "self._put(row, 2 * after[0])\n        held.filled", _STREAM),
    Fault("undo gives back no state", "layer/stream.py",
          "self._state.put(index, row.undo.state)", "self._state.put(index, None)", "tests/session tests/laws/test_l2_streaming.py"),
    Fault("a put row is read as it was", "layer/buffers.py", "self._stale.add(row)", "pass", "tests/session/test_buffers.py"),
    Fault("beams keep each other's state", "layer/cache.py",
          "self.fast_weight.select(beam_idx.tolist())", "pass", "tests/laws tests/test_hooks.py tests/session"),
    Fault("a forward in a forward takes its context", "layer/hooks.py",
          "this_thread().open = context.outer\n", "this_thread().open = None\n", "tests/test_hooks.py"),
    Fault("a graph writes padding", "layer/graph_ops.py",
          "    if mask is None:\n", "    if True:\n", "tests/laws/test_l12_static.py"),
    Fault("a graph counts a token before it reads it", "layer/forward_context.py",
          "return length.clone() if", "return length if", "tests/laws/test_l12_static.py"),
    Fault("single keys read the first row's state", "ops/indexed_reads.py",
          "torch.mv(maps[row], key)", "torch.mv(maps[0], key)", "tests/triton_kernels/test_indexed_reads.py"),
    Fault("conv does not start at zero", "layer/target.py",
          "            tensor.zero_()\n        if self.proj_init", "            tensor.fill_(0.01)\n        if self.proj_init",
          "tests/test_surgery.py"),
    Fault("revert forgets the config", "surgery.py",
          "    _replace_config(model, lm.config, unmarked(lm.config))\n    return model", "    return model", "tests/test_surgery.py"),
    Fault("a fingerprint looks at the first numbers alone", "checkpoint/fingerprint.py",
          "yield from ((f\"{prefix}.{name}\", p, None) for name, p in readable_parameters(module))",
          "yield from ((f\"{prefix}.{name}\", p, 1) for name, p in readable_parameters(module))",
          "tests/checkpoint/test_fingerprint.py tests/session"),
    Fault("a base's missing tensor is let through", "checkpoint/loading.py",
          "    refuse_lack(model, found[\"missing_keys\"])\n    refuse_reference_format", "    refuse_reference_format",
          "tests/checkpoint/test_refused_weights.py"),
    Fault("another's folder is replaced", "files/manifest.py",
          "    if entry is not None:\n", "    if False:\n", "tests/cli/test_outputs.py"),
    Fault("a session's counts are not looked at", "session/check.py",
          "self._require(right, f\"{name}.counts are out", "self._require(True, f\"{name}.counts are out", "tests/session"),
    Fault("a document's rest is dropped", "training/data/packing.py", "            start = stop\n", "            start = length\n",
          f"{_TRAINING}/test_packing.py"),
    Fault("the loss is scaled by one rank", "training/loop/trainer.py",
          "loss = own * self._divided_by", "loss = own", f"{_TRAINING}/test_splits.py {_TRAINING}/test_ulysses.py"),
    Fault("on - off is off - on", "evaluation/comparison.py",
          "known = [a - b for", "known = [b - a for", "tests/evaluation/test_comparison.py"),
    Fault("the window forgets its sinks", "attention_window.py",
          "return torch.cat([x[:, :, : self.sinks], x", "return torch.cat([x[:, :, :0], x", "tests/test_window.py"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="plant only faults with this text in their names"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.only or any(part in fault.name for part in args.only)]
    if args.list:
        print("\n".join(f"{fault.name} ({fault.file}): {fault.tests}" for fault in chosen))
        return 0
    survived = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "checkout"
        shutil.copytree(
            ROOT,
            copy,
            symlinks=True,
            ignore=shutil.ignore_patterns(".git", ".venv*", ".cache", "runs", "dist", "__pycache__"),
        )
        for shared in (".cache", ".venv"):
            (copy / shared).symlink_to(ROOT / shared)
        for fault in chosen:
            caught, seconds = plant(fault, copy)
            survived += caught is None
            print(
                f"{'SURVIVED' if caught is None else 'caught'}  {seconds:5.0f} s  {fault.name}: {caught or fault.tests}",
                flush=True,
            )
    print(f"{len(chosen) - survived} of {len(chosen)} faults are caught")
    return 1 if survived else 0


def plant(fault: Fault, copy: Path) -> tuple[str | None, float]:
    """Returns the first test that fails with the fault (None if all pass), and the seconds of the tests."""
    file, began = copy / "inplace_ttt" / fault.file, time.perf_counter()
    right = file.read_text(encoding="utf-8")
    if right.count(fault.right) != 1:
        raise SystemExit(
            f"{fault.file} has {right.count(fault.right)} places like {fault.right!r}; change the fault so that it matches one."
        )
    file.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--gate",
            "-x",
            "-q",
            "--timeout",
            "200",
            "-p",
            "no:cacheprovider",
            *fault.tests.split(),
        ]
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True
        )
    finally:
        file.write_text(right, encoding="utf-8")
    failed = [
        line.split(" ", 1)[1].split(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    if done.returncode != 0 and not failed:
        raise SystemExit(
            f"the tests of {fault.name!r} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return (failed[0] if failed else None), time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())

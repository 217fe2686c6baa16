"""The script for a GPU runs in tiny on a CPU, times nothing that is wrong, and stops when its time is up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check_kernels
import count_kernels
import gpu_check
import pytest
import situations
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_smoke_run_in_a_shell(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(
        [ROOT / "tools" / "gpu" / "gpu_check.sh", "--smoke"],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-8:]
    assert last[-1].startswith("tiny 96 tokens, paper, C 32, training step: ") and any(
        line.startswith("tiny T 128 C 32") for line in last
    )
    for name in ("checks", "ceilings", "kernels", "op", "situations", "models", "tiles"):
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["command"] == "tools/gpu/gpu_check.sh --smoke" and result["torch"] and result["rows"], (
            name
        )


def test_a_wrong_kernel_is_marked_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"name": "the one", "ok": False, "worst": 1.0, "bound": 1e-5, "where": "out"}
    monkeypatch.setattr(check_kernels, "checks", lambda device, smoke: iter([wrong]))
    monkeypatch.setattr(situations, "checks", lambda smoke: iter([]))
    for name in ("_models", "_ops", "_situations", "_alone"):
        monkeypatch.setattr(gpu_check, name, lambda *args: iter([]))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--smoke"])
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.main() == 1
    out = capsys.readouterr().out
    assert "wrong: the one" in out and "THE KERNELS ARE WRONG HERE" in out and "ceilings: " in out
    assert json.loads((tmp_path / "ceilings.json").read_text())["wrong"] == ["the one"]


@pytest.mark.full
def test_parts_of_the_checks_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_kernels, "_run", lambda *args: {"out": torch.ones(1)})
    monkeypatch.setattr(check_kernels, "_convolutions", lambda device, smoke: iter([{"name": "convolution"}]))
    whole = [row["name"] for row in check_kernels.checks("cpu", True)]
    parts = [row["name"] for part in range(3) for row in check_kernels.checks("cpu", True, part, 3)]
    assert sorted(parts) == sorted(whole) and len({*whole}) == len(whole)


def test_a_check_that_breaks_has_failed() -> None:
    def breaks() -> float:
        raise ValueError("no such luck")

    assert situations._check("it", lambda: 0.0)["ok"] and not situations._check("it", lambda: 1e-9)["ok"]
    assert (
        not situations._check("it", breaks)["ok"]
        and situations._check("it", breaks)["where"] == "ValueError: no such luck"
    )


def test_what_the_time_does_not_suffice_for_is_named() -> None:
    clock = gpu_check.Clock(minutes=0.1)
    shape = SimpleNamespace(product=1e12, tokens=8, chunk_size=4)
    assert list(gpu_check._ops([("A", shape)], clock, smoke=False)) == []
    assert clock.skipped[0].startswith("op at A, 8 tokens, chunks of 4: needs about 26 s")


def test_the_counts_in_the_documentation_are_the_script_s() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert "\n".join(count_kernels.tables(32768, 790, 4.3)) in page


def test_a_measurement_that_breaks_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shape: SimpleNamespace, *_: object) -> list[object]:
        if shape.tokens == 8:
            raise ValueError("no such luck")
        return []

    monkeypatch.setattr("inplace_ttt.ops.benchmark.measure", measure)
    clock = gpu_check.Clock(minutes=10)
    shapes = [("A", SimpleNamespace(product=1.0, tokens=n, chunk_size=4)) for n in (8, 16)]
    assert [row["tokens"] for row in gpu_check._ops(shapes, clock, smoke=False)] == [16]
    assert clock.skipped == ["op at A, 8 tokens, chunks of 4: ValueError: no such luck"]

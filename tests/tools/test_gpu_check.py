"""The script for a GPU runs in tiny on a CPU, times nothing that is wrong, and stops when its time is up."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_kernels
import count_kernels
import gpu_check
import pytest
import situations
import torch
from runner import Run, Task

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"device": "a CPU", "torch": "2"}


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
        assert {row["task"] for row in result["rows"]} == result["done"].keys()


def test_a_wrong_kernel_is_marked_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"name": "the one", "ok": False, "worst": 1.0, "bound": 1e-5, "where": "out"}
    monkeypatch.setattr(check_kernels, "checks", lambda device, smoke: iter([wrong]))
    monkeypatch.setattr(situations, "checks", lambda smoke: iter([]))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--smoke", "--only", "checks", "ceilings"])
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


def test_what_the_time_does_not_suffice_for_is_named(tmp_path: Path) -> None:
    shape = SimpleNamespace(product=1e12, tokens=8, chunk_size=4)
    run = Run(tmp_path, ABOUT, minutes=0.1)
    run.do([gpu_check._op("A", shape, smoke=False)])
    assert run.rows("op") == []
    assert run.skipped[0].startswith("op at A, 8 tokens, chunks of 4: needs about 26 s")


def test_the_counts_in_the_documentation_are_the_script_s() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert "\n".join(count_kernels.tables(32768, 790, 4.3)) in page


def test_a_measurement_that_breaks_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(shape: SimpleNamespace, *_: object, **__: object) -> list[object]:
        if shape.tokens == 8:
            raise ValueError("no such luck")
        return []

    monkeypatch.setattr("inplace_ttt.ops.benchmark.measure", measure)
    run = Run(tmp_path, ABOUT, minutes=10)
    shapes = [SimpleNamespace(product=1.0, tokens=n, chunk_size=4) for n in (8, 16)]
    run.do(gpu_check._op("A", shape, smoke=True) for shape in shapes)
    assert [row["tokens"] for row in run.rows("op")] == [16]
    assert run.skipped == ["op at A, 8 tokens, chunks of 4: ValueError: no such luck"]


def counted(made: list[str], name: str, cut_off_at: int | None = None) -> Task:
    def measure() -> Iterator[dict[str, Any]]:
        for number in range(3):
            if number == cut_off_at:
                raise KeyboardInterrupt
            made.append(f"{name}{number}")
            yield {"number": number}

    return Task("figures", name, 0, measure)


def test_a_run_resumes(tmp_path: Path) -> None:
    """A task that is done is not repeated, and one that was cut off is measured again, whole."""
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, ABOUT, 1).do([counted(made, "a"), counted(made, "b", cut_off_at=2)])
    run = Run(tmp_path, ABOUT, 1)
    assert [(row["task"], row["number"]) for row in run.rows("figures")] == [
        *(("a", n) for n in range(3)),
        *(("b", n) for n in range(2)),
    ]
    run.do([counted(made, "a"), counted(made, "b")])
    assert made == ["a0", "a1", "a2", "b0", "b1", "b0", "b1", "b2"]
    assert [(row["task"], row["number"]) for row in run.rows("figures")] == [
        (name, n) for name in "ab" for n in range(3)
    ]


def test_a_run_selects(tmp_path: Path) -> None:
    made: list[str] = []
    run = Run(tmp_path, ABOUT, 1, only=["B"])
    run.do([counted(made, "a"), counted(made, "b")])
    assert made == ["b0", "b1", "b2"] and not run.skipped


def test_figures_of_two_devices_are_not_mixed(tmp_path: Path) -> None:
    Run(tmp_path, ABOUT, 1).do([counted([], "a")])
    with pytest.raises(ValueError, match="has figures with device a CPU, not another"):
        Run(tmp_path, {**ABOUT, "device": "another"}, 1).do([counted([], "b")])


def test_the_clocks_are_those_during_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of nvidia-smi prints a line four times per second."""
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\nwhile :; do echo 1500, 2600, 300.5, 60; sleep 0.05; done\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def measure() -> Iterator[dict[str, Any]]:
        time.sleep(0.5)
        yield {}

    run = Run(tmp_path, ABOUT, 1)
    run.do([Task("figures", "a", 0, measure)])
    assert run.rows("figures")[0]["clocks"] == {
        "clocks.sm": 1500,
        "clocks.mem": 2600,
        "power.draw": 300.5,
        "temperature.gpu": 60,
    }

"""The comparison of two commits' times (tools/bench/against.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "bench" / "against.py"


def against(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *words], cwd=ROOT, capture_output=True, text=True)


def trees() -> str:
    return subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True).stdout


def test_each_tree_runs_its_own_code() -> None:
    """The command prints the length of its tree's path as a time, so the ratio shows that both trees ran."""
    before = trees()
    code = "import inplace_ttt, json; print(json.dumps({'op': {'seconds': len(inplace_ttt.__file__)}}))"
    done = against("HEAD", "--rounds", "2", "--", "-c", code)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.endswith("op seconds") and not line.startswith("  1.00")
    assert trees() == before


def test_a_failure_names_the_tree_and_leaves_none_behind() -> None:
    before = trees()
    done = against("HEAD", "--rounds", "1", "--", "-c", "raise SystemExit(3)")
    assert done.returncode == 1 and "with exit code 3" in done.stderr
    assert trees() == before


@pytest.mark.full
def test_the_op_is_compared() -> None:
    small = ("--d", "16", "--h", "32", "--tokens", "64", "--chunk-size", "16", "--repeats", "1")
    done = against("HEAD", "--rounds", "1", "--", "-m", "inplace_ttt.cli", "bench", "--json", *small)
    assert done.returncode == 0, done.stderr
    assert "rows fast_weight seconds" in done.stdout and "rows least squares forward_seconds" in done.stdout

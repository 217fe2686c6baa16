"""Runs a part of the tests in a new environment with other versions of our dependencies.

    python tools/release/try_versions.py transformers==5.16.1 torch==2.13.0

pip chooses peft, accelerate, deepspeed and all other requirements of the test extra. The result is a row in
the table of docs/results/notes/versions.md. After failures the exit code is 1, and the names of the failed
tests are on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "results" / "notes" / "versions.md"
SHOWN = ("transformers", "torch", "peft", "accelerate", "deepspeed")
TESTS = (  # tests that use transformers, torch, peft and DeepSpeed; about five minutes
    "tests/laws/test_l2_streaming.py",
    "tests/laws/test_l3_packed.py",
    "tests/laws/test_l4_padding.py",
    "tests/laws/test_l6_l7_identity.py",
    "tests/laws/test_masks.py",
    "tests/checkpoint",
    "tests/session",
    "tests/cli/test_verbs.py",
    "tests/test_surgery.py",
    "tests/test_surgery_training.py",
    "tests/test_window.py",
    "tests/training/test_lora.py",
    "tests/training/test_model.py",
    "tests/training/test_run.py",
    "tests/transformers_mixins",
)


def run_tests(python: Path, report: Path) -> tuple[int, list[str]]:
    """Returns the number of passed tests, and the names of the others."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    variables["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    # an operator that DeepSpeed compiles works with one torch only
    variables["TORCH_EXTENSIONS_DIR"] = str(report.parent / "extensions")
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--timeout",
        "1200",
        f"--junitxml={report}",
        *TESTS,
    ]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=sys.stderr)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with {done.returncode}, so no row was written; see its output above")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return len(cases) - len(failed) - len(skipped), [
        f"{case.get('classname')}::{case.get('name')}" for case in failed
    ]


def add_row(cells: list[str]) -> None:
    """Adds a row to the sorted table. It replaces a row of the same transformers and torch."""
    head, line, table = TABLE.read_text(encoding="utf-8").partition("|---|---|---|---|---|---|---|---|\n")
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    rows = [row for row in rows if row[:2] != cells[:2]] + [cells]
    rows.sort(key=lambda row: [[int(number) for number in re.findall(r"\d+", cell)] for cell in row[:2]])
    TABLE.write_text(head + line + "".join(f"| {' | '.join(row)} |\n" for row in rows), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requirement", nargs="+", help="requirement for pip, such as transformers==5.16.1")
    args = parser.parse_args()
    with TemporaryDirectory() as temporary:
        python = Path(temporary, "env", "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "install", "--quiet", "--no-cache-dir", *args.requirement, "--editable", f"{ROOT}[test]"],
            check=True,
        )
        listed = json.loads(subprocess.check_output([*pip, "list", "--format", "json"]))
        versions = {package["name"]: package["version"].partition("+")[0] for package in listed}
        passed, failed = run_tests(python, Path(temporary, "report.xml"))
    print("\n".join(failed), file=sys.stderr)
    add_row(
        [
            *(versions[name] for name in SHOWN),
            ".".join(map(str, sys.version_info[:2])),
            str(passed),
            str(len(failed)),
        ]
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

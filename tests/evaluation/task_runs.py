"""Runs of `inplace-ttt evaluate --tasks` on a tiny model, and their files."""

import json
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt import cli

LENGTH = 1500
BASIC = [
    "--tasks",
    "ruler_niah_single_2,ruler_fwe,ruler_qa_1,babilong_qa1,babilong_qa4",
    "--lengths",
    str(LENGTH),
]
BASIC += ["--text", "book.txt", "--qa", "questions.jsonl", "--samples", "3"]
QUICK = [
    "--tasks",
    "ruler_fwe,babilong_qa4",
    "--lengths",
    str(LENGTH),
    "--text",
    "book.txt",
    "--samples",
    "3",
]


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["evaluate", "ttt", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def predictions(folder: Path) -> dict[str, list[str]]:
    return {name: [sample["prediction"] for sample in file["samples"]] for name, file in kept(folder).items()}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command with bad input prints."""
    capsys.readouterr()
    assert cli.main(["evaluate", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("inplace-ttt")]
    assert out == "", out
    return line

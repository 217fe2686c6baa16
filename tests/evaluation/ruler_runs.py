"""Runs of `inplace-ttt ruler` on a tiny model, and their predictions."""

import json
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt import cli

LENGTH = 1024
BASIC = ["--lengths", str(LENGTH), "--tasks", "niah_single_2,fwe,qa_1", "--samples", "3"]
QUICK = ["--lengths", str(LENGTH), "--tasks", "fwe,qa_1", "--samples", "3"]


def command(*arguments: object) -> list[str]:
    return ["ruler", "ttt", "--haystack", "book.txt", "--qa", "questions.jsonl", *map(str, arguments)]


def ruler(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*command(*arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def predictions(folder: Path) -> dict[str, list[str]]:
    return {file.stem: json.loads(file.read_text())["predictions"] for file in sorted(folder.glob("*.json"))}

"""The audit of a real model: SmolLM2-135M, converted by the default preset, from the command line."""

import json
from pathlib import Path

import pytest

from inplace_ttt import cli

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m"
pytestmark = [pytest.mark.real, pytest.mark.full]


def test_smollm2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert MODEL.exists(), "run `make model` first"
    out = tmp_path / "converted"
    assert cli.main(["convert", str(MODEL), str(out), "--no-verify"]) == 0
    capsys.readouterr()
    assert cli.main(["audit", str(out), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["undeclared"] == []
    assert [item["id"] for item in values["items"] if item["verdict"] == "not checked"] == [
        "least-squares",
        "clip-scope",
        "clip-effect",
    ]

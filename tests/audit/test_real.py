"""The audit of a real model: SmolLM2-135M, converted by each preset, from the command line."""

import json
from pathlib import Path

import pytest

from inplace_ttt import cli

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m"
pytestmark = pytest.mark.real


@pytest.mark.parametrize(("preset", "undeclared"), [("paper", []), ("official", ["chunk-size", "target-source"])])
def test_smollm2(preset: str, undeclared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert MODEL.exists(), "run `make model` first"
    out = tmp_path / "converted"
    assert cli.main(["convert", str(MODEL), str(out), "--preset", preset, "--no-verify"]) == 0
    capsys.readouterr()
    code = cli.main(["audit", str(out), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert values["undeclared"] == undeclared and code == bool(undeclared)
    assert [item["id"] for item in values["items"] if item["verdict"] == "not checked"] == ["least-squares", "clip-scope", "clip-effect"]

"""The evidence's recipes load, and its tools print their tables from the results that are kept beside the documentation."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import facts_evidence
import memory_evidence
import pytest

from inplace_ttt.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "evidence").glob("*.yaml")), ids=lambda file: file.stem)
def test_recipes_load(file: Path) -> None:
    assert load_recipe(file).optimisation.steps


@pytest.mark.parametrize("tool", [facts_evidence, memory_evidence])
def test_tables_come_from_what_is_kept(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """The kept results are refused where texts or a recipe are no longer those that they were made with."""
    name = tool.__name__.removesuffix("_evidence")
    kept = tmp_path / f"{name}.json"
    kept.write_bytes((ROOT / "docs" / "results" / "cpu-2026-11" / f"{name}.json").read_bytes())
    monkeypatch.setattr(memory_evidence, "WORK", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--table", "--out", str(tmp_path / name)])
    assert not tool.main()
    assert capsys.readouterr().out.count("\n|") > 5
    kept.write_text(kept.read_text().replace('recipe_sha256": "', 'recipe_sha256": "0'))
    with pytest.raises(Exception, match="was made with recipe_sha256"):
        tool.main()

"""The evidence's recipes load, and its tools print their tables from the results that are kept beside the
documentation."""

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import facts_evidence
import grid_evidence
import kept_runs
import memory_evidence
import memory_models
import pytest
import recall_ablation
from sine import Sine

from inplace_ttt import InPlaceTTTError
from inplace_ttt.files.results import Results
from inplace_ttt.files.settings import read_settings
from inplace_ttt.training.recipe.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "file", sorted((ROOT / "recipes" / "evidence").glob("*.yaml")), ids=lambda file: file.stem
)
def test_recipes_load(file: Path) -> None:
    assert load_recipe(file).training.steps


@pytest.mark.parametrize("tool", [facts_evidence, grid_evidence, memory_evidence])
def test_tables_come_from_what_is_kept(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """The kept results are refused where texts or a recipe are no longer those that they were made with."""
    name = tool.__name__.removesuffix("_evidence")
    kept = tmp_path / f"{name}.json"
    kept.write_bytes((ROOT / "docs" / "results" / "cpu-2026-11" / f"{name}.json").read_bytes())
    for module in (kept_runs, memory_models):
        monkeypatch.setattr(module, "WORK", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--table", "--out", str(tmp_path / name)])
    assert not tool.main()
    assert capsys.readouterr().out.count("\n|") > 5
    kept.write_text(kept.read_text().replace('recipe_sha256": "', 'recipe_sha256": "0'))
    with pytest.raises(Exception, match="was made with recipe_sha256"):
        tool.main()


def test_texts_are_split_anew_where_there_are_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None stands on both sides, none that is gone is left."""
    monkeypatch.setattr(kept_runs, "TEXT", tmp_path / "text")
    monkeypatch.setattr(kept_runs, "WORK", tmp_path / "work")
    (tmp_path / "text").mkdir()

    def split(names: range) -> list[set[str]]:
        for number in range(40):
            file = tmp_path / "text" / f"{number:02}.txt"
            file.unlink(missing_ok=True) if number not in names else file.write_text("long enough " * 1100)
        kept_runs.split_texts()
        folders = [tmp_path / "work" / "text" / name for name in ("train", "held-out")]
        return [{file.name for file in folder.iterdir() if file.read_text()} for folder in folders]

    for names in (range(20), range(3, 32), range(3, 32), range(10)):
        train, held = split(names)
        assert (
            not train & held
            and train | held == {f"{number:02}.txt" for number in names}
            and len(held) == (len(names) + 4) // 9
        )


def test_a_folder_that_something_else_made_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a-0"
    kept_runs.made_by(folder, seed=0, settings=("x",))
    kept_runs.made_by(folder, seed=0, settings=("y",))  # nothing was made yet
    folder.mkdir()
    kept_runs.made_by(folder, seed=0, settings=("y",))
    assert kept_runs.stamp_of(folder) == {"seed": 0, "settings": ["y"]}
    for other in ({"seed": 1, "settings": ["y"]}, {"seed": 0}, {}):
        with pytest.raises(
            InPlaceTTTError,
            match="a-0 was made by another recipe, by other settings or from other texts; move it away",
        ):
            kept_runs.made_by(folder, **other)
    (tmp_path / "runs" / "b").mkdir()
    with pytest.raises(InPlaceTTTError, match="b was made by another"):
        kept_runs.made_by(tmp_path / "runs" / "b", seed=0)


def test_seconds_of_all_starts_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note, ends = tmp_path / "train.seconds", iter([SystemExit("stopped"), None])

    def command(*words: str) -> None:
        if (end := next(ends)) is not None:
            raise end

    clock = iter([0.0, 100.0, 0.0, 20.0])
    monkeypatch.setattr(kept_runs, "command", command)
    monkeypatch.setattr(kept_runs, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with pytest.raises(SystemExit):
        kept_runs.timed(note, "train")
    kept_runs.timed(note, "train")
    assert kept_runs.seconds_of(tmp_path) == {"train": 120}


def test_the_waves_that_are_kept_are_of_their_recipe() -> None:
    settings = read_settings(Sine, ROOT / "recipes" / "memories" / "sine-cpu.yaml")
    kept = Results(ROOT / "docs" / "results" / "cpu-2026-11").get("sine", settings=asdict(settings))
    assert kept is not None and len(kept["rows"]) == len(settings.seeds) * len(settings.models)


def test_a_state_in_half_precision_is_tried() -> None:
    (variant,) = (variant for variant in recall_ablation.VARIANTS if variant.state is not None)
    found = recall_ablation._run(variant, 0, Namespace(set=["data.validation_documents=2"], steps=1))
    assert found["loss"] > 0 and 0 <= found["on"] <= 1

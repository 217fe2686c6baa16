"""Bad input of every kind into every verb: exit code 2, one line, nothing left behind; and none of it caught
by the last net alone.

The same cases each time, a tenth of them in the gate. More of them, other ones each time: FUZZ=20 python -m
pytest tests/cli/test_fuzz.py takes twenty times as many and as long.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from inplace_ttt.cli import train
from inplace_ttt.training.loop.run_state import claim

from . import fuzz_arguments
from . import fuzz_damage as damage
from . import fuzz_world as worlds
from .fuzz_run import run

TIMES = float(os.environ.get("FUZZ", "1"))
TYPED = "hello\n"
"""A question for a chat."""


def fuzzed(examples: int) -> Any:
    """Settings of a test with so many cases."""
    return settings(
        max_examples=max(1, round(examples * TIMES)),
        derandomize=TIMES <= 1,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # a smaller case of the same is not worth its time
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.make_world(tmp_path_factory.mktemp("fuzz") / "world")


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that is good is not trained: what `train` refuses is refused before a process starts."""

    def launch(recipe: Any, arguments: Any) -> int:
        claim(Path(recipe.output))
        report = {
            "output": "x",
            "steps": 1,
            "final_loss": 1.0,
            "seconds": 1,
            "evaluation": {},
            "warnings": [],
        }
        (Path(recipe.output) / "train_report.json").write_text(json.dumps(report))
        return 0

    monkeypatch.setattr(train, "launch", launch)


def answered(folder: Path, words: list[str], as_json: bool, what: str) -> None:
    """Run a command on a damaged world, which is removed."""
    arguments = worlds.in_folder(folder, words) + ["--json"] * as_json
    here = Path.cwd()
    os.chdir(folder)
    try:
        problem = run(arguments, folder, TYPED).problem(arguments)
    finally:
        os.chdir(here)
        shutil.rmtree(folder)
    assert problem is None, f"{' '.join(words)}\n{what}\n{problem}"


def damages(world: Path, file: str) -> Any:
    """What may happen to a file, by its kind; every fourth time what may happen to any."""
    path = world / file
    if file.endswith(".safetensors") or file == "state":
        special: Any = damage.tensor_damage(path.read_bytes())
    elif file.endswith(".yaml"):
        special = damage.yaml_damage(path.read_text())
    elif file.endswith(".jsonl"):
        special = damage.lines_damage(path.read_text())
    elif file.endswith(".json"):
        special = damage.json_damage(path.read_text())
    else:
        return damage.raw_damage()
    return st.one_of(special, special, special, damage.raw_damage())


@pytest.mark.parametrize("target", worlds.TARGETS, ids=lambda target: target.file)
def test_damaged_files(target: worlds.Target, world: Path) -> None:
    @fuzzed(target.cases)
    @given(damages(world, target.file), st.sampled_from(target.commands), st.booleans())
    def case(chosen: tuple[str, damage.Damage], command: str, as_json: bool) -> None:
        name, harm = chosen
        folder = worlds.copy_of(world, world.parent / "case")
        harm(folder / target.file)
        answered(folder, command.split(), as_json, f"{target.file}: {name}")

    case()


def test_damaged_commands(world: Path) -> None:
    @fuzzed(300)
    @given(fuzz_arguments.damaged(), st.booleans())
    def case(chosen: tuple[str, list[str]], as_json: bool) -> None:
        name, words = chosen
        answered(worlds.copy_of(world, world.parent / "case"), words, as_json, name)

    case()


def test_there_are_a_thousand_cases() -> None:
    assert 300 + sum(target.cases for target in worlds.TARGETS) >= 1000


@pytest.mark.parametrize(
    "command", [*dict.fromkeys([*fuzz_arguments.COMMANDS, *(c for t in worlds.TARGETS for c in t.commands)])]
)
@pytest.mark.sample(14)
def test_what_is_not_damaged_works(command: str, world: Path) -> None:
    """Else the fuzz would prove nothing: every one of its commands does its work on what is whole."""
    folder = worlds.copy_of(world, world.parent / "case")
    try:
        outcome = run(worlds.in_folder(folder, command.split()), folder, TYPED)
    finally:
        shutil.rmtree(folder)
    assert outcome.code == 0 and not outcome.escaped, outcome.err

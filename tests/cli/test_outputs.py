"""Outputs x verbs x what already stands there: another's file or folder is never replaced, nor is a
source."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from inplace_ttt import cli
from inplace_ttt.audit.report import Report
from inplace_ttt.cli import audit, train
from inplace_ttt.files.manifest import MANIFEST

from . import fuzz_world as worlds
from .fuzz_run import run

FOLDERS = {
    "convert": ("base", "convert base OUT --layers 0 --chunk-size 8 --no-verify --overwrite"),
    "convert to an adapter": (
        "base",
        "convert base OUT --layers 0 --chunk-size 8 --no-verify --adapter-only --overwrite",
    ),
    "export reference": ("ttt", "export ttt OUT --format reference --overwrite"),
    "export adapter": ("ttt", "export ttt OUT --format adapter --overwrite"),
    "export full": ("lora", "export lora OUT --format full --overwrite"),
    "export plain": ("ttt", "export ttt OUT --format plain --session state --overwrite"),
    "export lora": ("ttt", "export ttt OUT --format lora --session state --overwrite"),
    "import": ("public", "import-reference public OUT --overwrite"),
    "diagnose": ("ttt", "diagnose ttt --text text.txt --tokens 40 --out OUT --overwrite"),
    "evaluate": ("ttt", "evaluate ttt --text text.txt other.txt --tokens 40 --out OUT --overwrite"),
    "samples": ("base", "evaluate base --lengths 512 --samples 1 --tasks ruler_vt --write-samples OUT"),
}
"""Verb -> what it reads, and its command."""
FILES = {
    "audit": ("ttt", "audit ttt --out OUT"),
    "generate": ("ttt", "generate ttt --prompt-file text.txt --max-new-tokens 0 --save-state OUT"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.make_world(tmp_path_factory.mktemp("outputs") / "world")


@pytest.fixture
def no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is what matters here, not what it finds."""
    monkeypatch.setattr(audit, "_audit", lambda path, args: Report(path, "paper", []))


def digest(folder: Path) -> dict[str, str]:
    """Every entry under a folder: a file by its bytes, a link by its target."""
    found = {}
    for entry in sorted(folder.rglob("*")):
        name = entry.relative_to(folder).as_posix()
        if entry.is_symlink():
            found[name] = os.readlink(entry)
        elif entry.is_file():
            found[name] = hashlib.sha256(entry.read_bytes()).hexdigest()
        else:
            found[name] = "folder"
    return found


def refused(folder: Path, command: str, out: str) -> str:
    """Run a command whose output cannot be written: exit code 2, one line, and not a byte is other than
    before."""
    words = [str(folder / out) if word == "OUT" else word for word in command.split()]
    before, here = digest(folder), Path.cwd()
    os.chdir(folder)
    try:
        outcome = run(worlds.in_folder(folder, words), folder)
    finally:
        os.chdir(here)
    assert outcome.code == 2 and outcome.problem(words) is None, (
        outcome.code,
        outcome.problem(words),
        outcome.err,
    )
    assert digest(folder) == before, outcome.err
    return outcome.err


def another_file(folder: Path, source: str) -> str:
    (folder / "mine").write_text("my thesis")
    return "mine"


def another_folder(folder: Path, source: str) -> str:
    (folder / "mine").mkdir()
    (folder / "mine" / "model.safetensors").write_text("my weights")
    return "mine"


def empty_names(folder: Path, source: str) -> str:
    """A folder of somebody's whose files have the names that are written."""
    shutil.copytree(folder / "ttt", folder / "mine")
    (folder / "mine" / MANIFEST).unlink()
    return "mine"


def weights(folder: Path, source: str) -> str:
    return (
        f"{source}/model.safetensors"
        if (folder / source / "model.safetensors").exists()
        else f"{source}/inplace_ttt.safetensors"
    )


def the_source(folder: Path, source: str) -> str:
    return source


def in_the_source(folder: Path, source: str) -> str:
    return f"{source}/out"


def around_the_source(folder: Path, source: str) -> str:
    return "."


def a_link_to_another(folder: Path, source: str) -> str:
    another_folder(folder, source)
    (folder / "link").symlink_to("mine")
    return "link"


def a_link_to_the_source(folder: Path, source: str) -> str:
    (folder / "link").symlink_to(source)
    return "link"


def a_broken_manifest(folder: Path, source: str) -> str:
    another_folder(folder, source)
    (folder / "mine" / MANIFEST).write_text("{")
    return "mine"


def another_kind(folder: Path, source: str) -> str:
    """An output of ours that is of a kind this verb does not write."""
    shutil.copytree(folder / "ttt", folder / "mine")
    manifest = json.loads((folder / "mine" / MANIFEST).read_text())
    (folder / "mine" / MANIFEST).write_text(json.dumps({**manifest, "kind": "trained checkpoint"}))
    return "mine"


PLACES: list[Callable[[Path, str], str]] = [
    another_file, another_folder, empty_names, weights, the_source, in_the_source, around_the_source, a_link_to_another,
    a_link_to_the_source, a_broken_manifest, another_kind,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("verb", FOLDERS)
def test_no_folder_of_another_is_replaced(
    world: Path, tmp_path: Path, verb: str, place: Callable[[Path, str], str]
) -> None:
    folder = worlds.copy_of(world, tmp_path / "world")
    source, command = FOLDERS[verb]
    refused(folder, command, place(folder, source))


@pytest.mark.parametrize(
    "place",
    [another_file, another_folder, weights, the_source, a_link_to_another],
    ids=lambda place: place.__name__,
)
@pytest.mark.parametrize("verb", FILES)
def test_no_file_of_another_is_replaced(
    world: Path, tmp_path: Path, verb: str, place: Callable[[Path, str], str]
) -> None:
    folder = worlds.copy_of(world, tmp_path / "world")
    source, command = FILES[verb]
    refused(folder, command, place(folder, source))


@pytest.mark.parametrize("change", ["added", "edited", "a folder", "a link", "read-only"])
@pytest.mark.parametrize("verb", ["convert", "export adapter", "import"])
def test_an_earlier_output_is_replaced_only_as_it_was_written(
    world: Path, tmp_path: Path, verb: str, change: str
) -> None:
    folder = worlds.copy_of(world, tmp_path / "world")
    command = FOLDERS[verb][1]
    words = [str(folder / "out") if word == "OUT" else word for word in command.split()]
    for _ in range(2):
        assert run(worlds.in_folder(folder, words), folder).code == 0, (
            "an output as it was written is replaced"
        )
    out = folder / "out"
    if change == "added":
        (out / "notes.md").write_text("mine")
    elif change == "edited":
        (out / "README.md").write_text("my own card")
    elif change == "a folder":
        (out / "more").mkdir()
    elif change == "a link":
        (out / "more").symlink_to("/nowhere")
    else:
        out.chmod(0o555)
    refused(folder, command, "out")
    out.chmod(0o755)


@pytest.mark.parametrize("verb", FILES)
def test_an_earlier_file_is_replaced_unless_it_is_read_only(
    world: Path, tmp_path: Path, verb: str, no_audit: None
) -> None:
    folder = worlds.copy_of(world, tmp_path / "world")
    command = FILES[verb][1]
    words = worlds.in_folder(
        folder, [str(folder / "kept") if word == "OUT" else word for word in command.split()]
    )
    for _ in range(2):
        assert run(words, folder).code == 0
    (folder / "kept").chmod(0o444)
    assert "read-only" in refused(folder, command, "kept")


@pytest.mark.parametrize("form", ["md", "html", "json"])
def test_a_report_of_the_audit_is_known_in_every_form(
    world: Path, tmp_path: Path, form: str, no_audit: None
) -> None:
    out = tmp_path / "report"
    for _ in range(2):
        assert cli.main(["audit", str(world / "ttt"), "--format", form, "--out", str(out)]) == 0
    text = out.read_text()
    out.write_text(
        text.replace("In-Place TTT audit: ", "My essay: ").replace('"stale_declarations"', '"mine"')
    )
    assert cli.main(["audit", str(world / "ttt"), "--format", form, "--out", str(out)]) == 2


TAKEN = {
    "final": "final/mine.txt",
    "a checkpoint": "checkpoint-1/mine.txt",
    "a later checkpoint": "checkpoint-7/mine.txt",
    "a file for a folder": "checkpoint-2",
    "a log": "log.jsonl",
    "a report": "train_report.json",
    "an audit": "audit.md",
    "diagnoses": "diagnose/mine.txt",
    "a tensorboard": "tensorboard/events",
}


@pytest.mark.parametrize("options", [[], ["--from-scratch"]], ids=["resume", "from scratch"])
@pytest.mark.parametrize("taken", TAKEN)
def test_train_takes_no_name_of_anothers(
    world: Path, tmp_path: Path, taken: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("it must be refused before anything starts"))
    folder = worlds.copy_of(world, tmp_path / "world")
    file = folder / "run" / TAKEN[taken]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    refused(folder, " ".join(["train", str(folder / "recipe.yaml"), *options]), "run")


@pytest.mark.parametrize("output", ["base", "base/run", "ttt", "text.txt", "link"])
def test_train_does_not_write_into_what_it_reads(
    world: Path, tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "launch", lambda *_: pytest.fail("it must be refused before anything starts"))
    folder = worlds.copy_of(world, tmp_path / "world")
    (folder / "link").symlink_to("base")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    converted = output == "ttt"
    recipe["model"] = {"path": str(folder / ("ttt" if converted else "base")), "dtype": "float32"}
    recipe["data"] = {"train": [str(folder / "text.txt")], "sequence_length": 64}
    if converted:
        recipe.pop("ttt", None)
    else:
        recipe["ttt"] = {**recipe["ttt"], "layers": [0]}
    recipe["output"] = str(folder / output)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert "choose another output" in refused(folder, f"train {folder / 'recipe.yaml'}", output)

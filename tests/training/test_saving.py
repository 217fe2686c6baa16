"""What a run saves and removes: its own files, whole, each weight once; and nothing is trained that could not
be saved."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import logits
from safetensors.torch import save_file
from transformers import AutoTokenizer

from inplace_ttt import load
from inplace_ttt.files.manifest import STEP, write_manifest
from inplace_ttt.training.loop.checkpoints import Saved, files_in, last_checkpoint, mark_complete
from inplace_ttt.training.loop.saving import keep_newest

from .runs import checkpoint, documents, finish, recipe_file, start, trained, weights


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    checkpoint(folder / "model")
    documents(folder / "text")
    return folder


def test_a_run_removes_and_replaces_its_own_files_alone(made: Path, tmp_path: Path) -> None:
    recipe = recipe_file(
        tmp_path,
        made / "model",
        made / "text",
        training={"steps": 2},
        monitor={"save_steps": 1, "save_total_limit": 1},
    )
    output = tmp_path / "out"
    trained(recipe)
    assert [folder.name for folder in output.glob("checkpoint-*")] == ["checkpoint-2"] and not (
        output / ".saving"
    ).exists()
    (output / "checkpoint-2" / "notes.md").write_text("mine")
    (output / "mine.txt").write_text("mine")
    longer = ("training.steps=4",)
    report, log = trained(recipe, *longer)
    assert (
        report["resumed_from"].endswith("checkpoint-2")
        and "is not removed completely: it holds notes.md" in log
    )
    assert [file.name for file in (output / "checkpoint-2").iterdir()] == ["notes.md"], (
        "all that the run wrote is gone"
    )
    assert last_checkpoint(output) == output / "checkpoint-4"
    shutil.copy(output / "mine.txt", output / "final" / "mine.txt")
    before = {file: file.stat().st_mtime_ns for file in output.rglob("*") if file.is_file()}
    for flags in ((), ("--from-scratch",)):
        log = finish(start(recipe, "training.steps=6", flags=flags), code=2)
        assert "final holds mine.txt, which inplace-ttt did not write" in log
        assert {file: file.stat().st_mtime_ns for file in output.rglob("*") if file.is_file()} == before
    (output / "final" / "mine.txt").unlink()
    shutil.rmtree(output / "checkpoint-2")
    assert trained(recipe, "training.steps=6")[0]["resumed_from"].endswith("checkpoint-4"), (
        "and an earlier end is replaced"
    )


def test_a_truncated_checkpoint_does_not_count(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"x": torch.ones(9)}, folder / "model.safetensors")
        mark_complete(folder, Saved(files_in(folder), {}))
        write_manifest(folder, STEP)
    file = tmp_path / "checkpoint-6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    keep_newest(tmp_path, 1)
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["checkpoint-4", "checkpoint-6"]


def broken_temperature(model: Path) -> None:
    """transformers loads it with a warning, and refuses to save it once the tokenizer has changed its pad
    token."""
    (model / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.9}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = "t4"
    tokenizer.save_pretrained(model)


def broken_beams(model: Path) -> None:
    (model / "generation_config.json").write_text(
        json.dumps({"num_beams": 1, "length_penalty": 3.0, "early_stopping": True})
    )


def broken_top_p(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"do_sample": False, "top_p": 0.5, "top_k": 3}))


@pytest.mark.parametrize(
    "damage", [broken_temperature, broken_beams, broken_top_p], ids=lambda damage: damage.__name__
)
@pytest.mark.sample(1)
def test_what_cannot_be_saved_is_refused_before_the_first_step(
    made: Path, tmp_path: Path, damage: object
) -> None:
    model = tmp_path / "model"
    shutil.copytree(made / "model", model)
    damage(model)  # type: ignore[operator]
    recipe = recipe_file(tmp_path, model, made / "text")
    log = finish(start(recipe), code=2)
    assert "cannot save " in log and "GenerationConfig" in log and "unexpected" not in log
    assert not (tmp_path / "out" / "log.jsonl").exists() and not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.sample(1)
def test_a_tied_weight_is_saved_once(made: Path, tmp_path: Path, stage: int) -> None:
    tied = checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    recipe = recipe_file(
        tmp_path, tied, made / "text", training={"steps": 1}, monitor={"save_steps": 1}, deepspeed=stage
    )
    report, _ = trained(recipe)
    for folder in (tmp_path / "out" / "checkpoint-1", Path(report["output"])):
        assert "lm_head.weight" not in weights(folder) and "model.embed_tokens.weight" in weights(folder)
    model = load(report["output"], dtype=torch.float32)
    assert (
        model.lm_head.weight is model.model.embed_tokens.weight
        and logits(model, torch.arange(3, 60)[None]).isfinite().all()
    )

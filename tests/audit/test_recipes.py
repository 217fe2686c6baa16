"""The audit of a recipe, and the gate before a run's first step."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import word_level
from training.recipes import CONFIG, tiny_recipe
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, KeyWhitening, cli
from inplace_ttt.training.audit import audit_recipe, gate, write_report
from inplace_ttt.training.audit.catalog import RECIPE
from inplace_ttt.training.audit.rows import read_rows
from inplace_ttt.training.audit.small_model import _narrowed_ttt
from inplace_ttt.training.data.building import TrainingData
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.data.packing import pack
from inplace_ttt.training.loop import parameters
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.recipe import Recipe

PAPER: dict[str, Any] = {
    "model": {
        "config": {**CONFIG, "num_hidden_layers": 7, "max_position_embeddings": 131072},
        "tokenizer": "nowhere",
        "dtype": "float32",
    },
    "ttt": {"preset": "paper"},
    "data": {"train": "nowhere.txt", "sequence_length": 32768},
    "training": {"tokens": 20_000_000_000, "learning_rate": 3e-4, "batch_size": 64},
}
IDS = {item.id for item in RECIPE}


def report(folder: Path, *overrides: str, **sections: Any) -> Any:
    recipe = tiny_recipe(folder, *overrides, **{**PAPER, **sections})
    return gate(build_model(recipe), recipe)


@pytest.mark.full
def test_the_papers_settings_have_no_deviation(tmp_path: Path) -> None:
    found = report(tmp_path)
    assert found.undeclared == []
    assert {r.item.id for r in found.items if r.verdict == "unspecified"} >= {"schedule", "optimizer"}


# What a recipe changes, and the item that says so.
CHANGES = {
    "training.trainable=ttt": "trained-parameters",
    "training.learning_rate=1e-4": "learning-rate",
    "training.weight_decay=0.0": "weight-decay",
    "training.tokens=1000000": "token-budget",
    "data.sequence_length=16384": "stages",
    "ttt.chunk_size=128": "chunk-size",
    "ttt.target=hidden_states": "target-source",
    "model.overrides.rope_parameters={rope_type: yarn, factor: 4.0, original_max_position_embeddings: "
    "32768}": "yarn",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sample(1)
def test_a_change_has_one_owner(change: str, tmp_path: Path) -> None:
    assert report(tmp_path, change).undeclared == [CHANGES[change]]


def test_soft_targets_are_an_extension(tmp_path: Path) -> None:
    found = report(tmp_path, "training.distillation={weight: 0.3}")
    assert found["training-loss"].verdict == "extension" and found.undeclared == []


@pytest.mark.full
def test_low_rank_adapters_are_audited_too(tmp_path: Path) -> None:
    assert report(tmp_path, "training.trainable=lora").undeclared == ["trained-parameters"]


@pytest.mark.full
def test_the_second_stage_wants_yarn(tmp_path: Path) -> None:
    changes = ("data.sequence_length=131072", "training.tokens=15000000000")
    assert report(tmp_path, *changes).undeclared == ["yarn"]
    rope = (
        "model.overrides.rope_parameters={rope_type: yarn, factor: 4.0, "
        "original_max_position_embeddings: 32768}"
    )
    assert report(tmp_path, *changes, rope).undeclared == []


@pytest.mark.full
def test_a_recipe_declares(tmp_path: Path) -> None:
    declared = {
        "profile": "paper",
        "deviations": [{"id": "learning-rate", "why": "a short run"}, {"id": "yarn", "why": "no longer"}],
    }
    found = report(tmp_path, "training.learning_rate=1e-4", audit=declared)
    assert found.undeclared == [] and [d.id for d in found.stale_declarations] == ["yarn"]


def data_of(recipe: Recipe, **report: Any) -> TrainingData:
    """Rows of random documents, their report with some numbers changed."""
    tokens = torch.randint(3, CONFIG["vocab_size"], (3, 40_000), generator=torch.Generator().manual_seed(0))
    documents = [row.tolist() for row in tokens]
    rows = Dataset.from_list(list(pack(documents, recipe.data.sequence_length, 0)))
    counts = {"long_share": 0.25, "tokens": 1000, "chunks_per_piece": {"min": 0, "median": 1, "max": 3}}
    return TrainingData(rows, None, SimpleNamespace(**{**counts, **report}), lambda: iter(documents))  # type: ignore[arg-type]


@pytest.mark.full
def test_documents_are_measured(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, **PAPER)
    model = build_model(recipe)
    bare, measured = gate(model, recipe), gate(model, recipe, data=data_of(recipe))
    assert {bare[id].verdict for id in ("long-documents", "data-rows")} == {"not checked"}
    assert (
        measured["long-documents"].outcome.found == "25.0% of the tokens"
        and measured["data-rows"].verdict == "conforms"
    )
    assert gate(model, recipe, data=data_of(recipe, long_share=0.0)).undeclared == ["long-documents"]


@pytest.mark.parametrize("begins", [(), (1, 1)], ids=["plain", "begun"])
@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("align", [1, 16])
def test_rows_are_held_against_documents(
    begins: tuple[int, ...], streaming: bool, align: int, tmp_path: Path
) -> None:
    """Of every kind of data that a recipe can have, also where special tokens begin every text."""
    lengths = (70, 33, 150, 12, 300, 64, 5, 41, 128, 16, 90)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, length in enumerate(lengths):
        (folder / f"{number:02}.txt").write_text(" ".join(f"t{(7 * number + i) % 50}" for i in range(length)))
    word_level((f"t{i}" for i in range(50)), len(begins)).save_pretrained(tmp_path / "tokenizer")
    given = {"train": str(folder), "sequence_length": 64, "streaming": streaming, "shuffle": True}
    cache = {} if streaming else {"cache": str(tmp_path / "cache")}
    shared = {"nproc_per_node": 2, "sequence_parallel_size": 2} if align > 1 else {"nproc_per_node": 1}
    recipe = tiny_recipe(tmp_path, data={**given, **cache}, parallel=shared, ttt={"chunk_size": 16})
    data = build_data(recipe, AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), 16)
    assert (data.align, data.begins) == (align, begins)
    found = read_rows(recipe, data)
    assert found.verdict == "conforms" and found.numbers["rows"] > 5
    shifted = dataclasses.replace(data, documents=lambda: itertools.islice(data.documents(), 1, None))
    assert read_rows(recipe, shifted).verdict == "deviates"
    if begins:
        assert all(tuple(row["input_ids"][:2]) == begins for row in itertools.islice(iter(data.train), 6))
        assert read_rows(recipe, dataclasses.replace(data, begins=())).verdict == "deviates"


# What a recipe sets that comes to nothing, and the item that says so.
IDLE = {
    "training.learning_rate=1e-20": "learning-rate",
    "training.conv_learning_rate=1e-20": "learning-rate",
    "training.eta_warmup_steps=100000000": "schedule",
    "training.ttt_warmup_steps=100000000": "schedule",
}


@pytest.mark.parametrize("change", IDLE)
@pytest.mark.full
def test_a_setting_that_comes_to_nothing_is_a_deviation(change: str, tmp_path: Path) -> None:
    assert report(tmp_path, change).undeclared == [IDLE[change]]


@pytest.mark.parametrize("train", ["all", "ttt", "lora"])
@pytest.mark.full
def test_what_the_optimizer_leaves_out_is_a_deviation(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = parameters.parameter_groups
    recipe = tiny_recipe(tmp_path, f"training.trainable={train}", **PAPER)
    assert gate(build_model(recipe), recipe)["optimizer"].verdict == "unspecified"
    monkeypatch.setattr(
        parameters, "parameter_groups", lambda *args: [g for g in groups(*args) if g["name"] != "proj"]
    )
    found = gate(build_model(recipe), recipe)["optimizer"]
    assert (
        found.verdict == "deviates"
        and "ttt" in found.outcome.found
        and "proj is not optimized" in found.outcome.found
    )


@pytest.mark.full
def test_the_report_lies_beside_the_run(tmp_path: Path) -> None:
    found = report(tmp_path, "training.learning_rate=1e-4")
    page = write_report(found, tmp_path / "run")
    assert sorted(p.name for p in page.parent.iterdir()) == ["audit.html", "audit.json", "audit.md"]
    assert json.loads((page.parent / "audit.json").read_text())["undeclared"] == ["learning-rate"]


@pytest.mark.full
def test_the_recall_recipe_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "recall-cpu.yaml"
    capsys.readouterr()
    code = cli.main(["audit", str(recipe), "--json"])
    values = json.loads(capsys.readouterr().out)
    assert code == 0 and {item["id"] for item in values["items"]} >= IDS
    assert {item["id"] for item in values["items"] if item["verdict"] == "deviates"} == {
        "chunk-size",
        "learning-rate",
        "token-budget",
        "stages",
    }
    assert (
        next(i for i in values["items"] if i["id"] == "long-documents")["evidence"]["numbers"][
            "share of tokens"
        ]
        == 1.0
    )
    assert {result.item.id: result.verdict for result in audit_recipe(recipe).items} == {
        i["id"]: i["verdict"] for i in values["items"]
    }


def test_a_rank_is_narrowed_with_the_model_and_a_share_of_the_width_is_not() -> None:
    for rank, wanted in ((0.75, 0.75), (256, 32), (None, None)):
        assert _narrowed_ttt(InPlaceTTTConfig(whitening=KeyWhitening(rank)), 8).whitening == KeyWhitening(
            wanted
        )

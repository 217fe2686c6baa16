"""A run that diagnoses itself: the folders that it leaves, and that the run is otherwise the same to the
bit."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from inplace_ttt import load
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.evaluation.comparison import compare
from inplace_ttt.evaluation.protocol import Protocol
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.data.packing import pack
from inplace_ttt.training.loop.monitor import document_to_diagnose, documents_to_compare
from inplace_ttt.training.recipe.recipe import load_recipe

from .recipes import tiny_recipe
from .runs import CHUNK, checkpoint, documents, logged, recipe_file, trained, weights

EVERY = ("monitor.diagnose_steps=2", "monitor.compare_steps=2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnose")
    checkpoint(folder / "model")
    documents(folder / "text")
    return folder


@pytest.mark.parametrize(("stage", "processes"), [(1, 1), (2, 2)])
@pytest.mark.sample(1)
def test_a_diagnosed_run_is_the_run(stage: int, processes: int, made: Path, tmp_path: Path) -> None:
    """Between two optimizer steps and their micro-steps: weights, losses and logged gradients are those of
    the plain run."""
    recipe = recipe_file(tmp_path, made / "model", made / "text", data={"validation_documents": 2})
    settings = (f"deepspeed={stage}", f"parallel.nproc_per_node={processes}")
    plain, _ = trained(recipe, *settings, f"output={tmp_path}/plain")
    diagnosed, _ = trained(recipe, *settings, *EVERY, f"output={tmp_path}/diagnosed")
    before, after = weights(Path(plain["output"])), weights(Path(diagnosed["output"]))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for key in ("loss", "grad_norm", "layers"):
        assert logged(tmp_path / "plain", key) == logged(tmp_path / "diagnosed", key)
    assert [folder.name for folder in (tmp_path / "diagnosed" / "diagnose").iterdir()] == ["step-2"]
    folder = tmp_path / "diagnosed" / "diagnose" / "step-2"
    assert {"report.html", "diagnose.json", "gradients.png", "writes.png"} <= {
        file.name for file in folder.iterdir()
    }
    found = json.loads((folder / "diagnose.json").read_text())
    assert found["chunks_read"] > 1 and found["groups"]["conv"]["gradient"] > 0
    assert not [finding for finding in found["findings"] if finding["severity"] == "severe"], found[
        "findings"
    ]
    assert not (tmp_path / "plain" / "diagnose").exists()

    lines = [json.loads(line) for line in (tmp_path / "diagnosed" / "log.jsonl").read_text().splitlines()]
    first, second = (line["comparison"] for line in lines if "comparison" in line)
    given = load_recipe(recipe)
    held_out = build_data(given, AutoTokenizer.from_pretrained(made / "model"), CHUNK).validation
    by_hand = compare(
        load(made / "model", dtype=torch.float32),
        documents_to_compare(held_out, CHUNK),
        Protocol(batch_size=2),
    )
    assert (
        first["difference"] == pytest.approx(by_hand.to_dict()["difference"], abs=1e-5)
        and first["off"] != second["off"]
    )
    assert (
        abs(second["difference"]["mean"]) > 1e-4
        and second["document_gain"]["n"] == second["difference"]["n"] > 1
    )
    assert diagnosed["speed"]["step_seconds"] > 0 and diagnosed["speed"]["model_tflops_per_device"] > 0


@pytest.mark.parametrize(
    "settings",
    [
        ("deepspeed=3",),
        (
            "deepspeed=1",
            "parallel.nproc_per_node=2",
            "parallel.sequence_parallel_size=2",
            "monitor.save_steps=4",
        ),
    ],
)
def test_partitioned_weights_and_shared_rows_are_refused(settings: tuple[str, ...], tmp_path: Path) -> None:
    for every in EVERY:
        with pytest.raises(InPlaceTTTError, match="_steps needs whole weights and whole rows on a process"):
            tiny_recipe(tmp_path, every, *settings)


def test_a_comparison_needs_documents(tmp_path: Path) -> None:
    with pytest.raises(
        InPlaceTTTError, match=r"compare_steps needs held-out documents; set data\.validation"
    ):
        tiny_recipe(tmp_path, "monitor.compare_steps=2")
    row = {name: list(range(17)) for name in ("input_ids", "position_ids", "labels")}
    with pytest.raises(
        InPlaceTTTError, match=r"no held-out document has more than 17 tokens, so monitor\.compare_steps"
    ):
        documents_to_compare([row], CHUNK)


def test_the_longest_document_is_diagnosed() -> None:
    lengths = [(5, 40, 3), (20, 28), (48,)]
    rows = [
        {
            "input_ids": torch.arange(48) + 100 * n,
            "position_ids": torch.cat([torch.arange(length) for length in row]),
            "labels": torch.arange(48),
        }
        for n, row in enumerate(lengths)
    ]
    assert document_to_diagnose(rows[:2], CHUNK).tolist() == [list(range(5, 45))]
    assert document_to_diagnose(rows, CHUNK).tolist() == [list(range(200, 248))]
    long = {name: torch.arange(5000) for name in ("input_ids", "position_ids", "labels")}
    assert document_to_diagnose([long], CHUNK).shape == (1, 2048)
    assert document_to_diagnose([long], 1024).shape == (1, 4097)


def test_padding_is_no_document() -> None:
    """It fills most of the row, and the packed documents are all shorter."""
    (row,) = pack([list(range(1000, 1020)), list(range(2000, 2060))], 256, 7)
    assert documents_to_compare([row], CHUNK)[0].tolist() == list(range(2000, 2060))
    assert document_to_diagnose([row], CHUNK).tolist() == [list(range(2000, 2060))]

"""A run that is stopped, however it is stopped, goes on as if it had not been."""

import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt.training.data import build_data
from inplace_ttt.training.recipe import load_recipe
from inplace_ttt.training.trainer import last_checkpoint

from .runs import CHUNK, checkpoint, documents, finish, logged, recipe_file, start, trained, weights

STEPS = {"steps": 32, "learning_rate": 1e-3, "eta_warmup_steps": 16, "warmup_steps": 5, "accumulation": 1}


def test_killed_while_it_trains_and_saves_then_resumed(tmp_path: Path) -> None:
    """kill -9 of all processes, an unfinished checkpoint beside the whole ones: bit for bit the unbroken run."""
    recipe = recipe_file(
        tmp_path,
        checkpoint(tmp_path / "model", attention_dropout=0.1),  # so that the generators' states matter
        documents(tmp_path / "text"),
        optimisation=STEPS,
        monitor={"log_every": 1, "save_every": 4, "keep": 2},
        parallel={"processes": 2},
    )
    finish(start(recipe, f"output={tmp_path}/whole"))
    broken = tmp_path / "broken"
    process = start(recipe, f"output={broken}")
    while last_checkpoint(broken) is None and process.is_running():
        time.sleep(0.005)
    process.kill()
    found = last_checkpoint(broken)
    assert found is not None and not (broken / "final").exists()
    done = int(found.name.removeprefix("checkpoint-"))
    assert 4 <= done < 32
    (broken / "checkpoint-31").mkdir(exist_ok=True)  # as a kill in the middle of a save leaves it
    report, log = trained(recipe, f"output={broken}")
    assert report["resumed_from"] == str(last_checkpoint(broken)).replace("checkpoint-32", found.name) and "checkpoint-31" in log
    whole, resumed = weights(tmp_path / "whole" / "final"), weights(broken / "final")
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    assert logged(broken, "loss")[-1] == logged(tmp_path / "whole", "loss")[-1]
    assert len(list(broken.glob("checkpoint-*"))) == 2
    AutoModelForCausalLM.from_pretrained(broken / "final")


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, checkpoint(tmp_path / "model"), documents(tmp_path / "text"))
    finish(start(recipe))
    log = finish(start(recipe), code=2)
    assert "has run all 3 steps already; raise optimisation.steps, or name another output." in log
    finish(start(recipe, flags=("--from-scratch",)))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_disk_at_a_save(stage: int, tmp_path: Path) -> None:
    """Files may not grow beyond what the first shards need: one line, exit code 2, no checkpoint called complete."""
    recipe = recipe_file(tmp_path, checkpoint(tmp_path / "model"), documents(tmp_path / "text"), deepspeed=stage)
    build_data(load_recipe(recipe), AutoTokenizer.from_pretrained(tmp_path / "model"), CHUNK)  # so that its cache is there
    log = finish(start(recipe, largest_file=20_000), code=2)
    assert "inplace-ttt: error: cannot save" in log and "free some space" in log
    assert last_checkpoint(tmp_path / "out") is None and not (tmp_path / "out" / "final").exists()

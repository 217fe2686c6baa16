"""A run that is stopped, however it is stopped, goes on as if it had not been; one that cannot says why."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import RIDGE
from transformers import AutoModelForCausalLM, AutoTokenizer

from inplace_ttt import cli
from inplace_ttt.surgery import config_of
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.loop.checkpoints import last_checkpoint
from inplace_ttt.training.loop.run_state import held
from inplace_ttt.training.recipe.recipe import load_recipe

from .runs import CHUNK, checkpoint, documents, finish, logged, recipe_file, start, trained, weights

STEPS = {
    "steps": 32,
    "learning_rate": 1e-3,
    "eta_warmup_steps": 16,
    "warmup_steps": 5,
    "gradient_accumulation_steps": 1,
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe.yaml and `whole`, the output of its run: checkpoints 28 and 32 of 32 steps in two
    processes."""
    folder = tmp_path_factory.mktemp("resume")
    recipe = recipe_file(
        folder,
        checkpoint(folder / "model", RIDGE, attention_dropout=0.1),  # so that the generators' states matter
        documents(folder / "text"),
        training=STEPS,
        data={"validation_documents": 2},
        monitor={"logging_steps": 1, "save_steps": 4, "save_total_limit": 2},
        parallel={"nproc_per_node": 2},
        output=str(folder / "whole"),
    )
    finish(start(recipe))
    return folder


def without_final(unbroken: Path, output: Path) -> Path:
    """The run as a kill after its last checkpoint leaves it."""
    shutil.copytree(unbroken / "whole", output)
    shutil.rmtree(output / "final")
    (output / "train_report.json").unlink()
    return output


def assert_same(unbroken: Path, output: Path) -> None:
    whole, resumed = weights(unbroken / "whole" / "final"), weights(output / "final")
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    assert logged(output, "loss") == logged(unbroken / "whole", "loss")


def test_killed_while_it_trains_and_saves_then_resumed(unbroken: Path, tmp_path: Path) -> None:
    """kill -9 of all processes, an unfinished checkpoint beside the whole ones: bit for bit the unbroken
    run."""
    recipe, broken = unbroken / "recipe.yaml", tmp_path / "broken"
    process = start(recipe, f"output={broken}")
    while last_checkpoint(broken) is None and process.is_running():
        time.sleep(0.005)
    process.kill()
    found = last_checkpoint(broken)
    assert found is not None and not (broken / "final").exists()
    done = int(found.name.removeprefix("checkpoint-"))
    assert 4 <= done < 32
    left = broken / ".saving" / "checkpoint-31"  # as a kill in the middle of a save leaves it
    left.mkdir(parents=True, exist_ok=True)
    (left / "model.safetensors").write_text("half")
    report, log = trained(recipe, f"output={broken}")
    assert report["resumed_from"] == str(found) and "Traceback" not in log and not left.parent.exists()
    assert_same(unbroken, broken)
    assert len(list(broken.glob("checkpoint-*"))) == 2
    AutoModelForCausalLM.from_pretrained(broken / "final")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name
)
@pytest.mark.sample(1)
def test_asked_to_stop(unbroken: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A signal to one of two processes: both stop after the same step, with a checkpoint of it, and go on bit
    for bit."""
    recipe, output = unbroken / "recipe.yaml", tmp_path / "out"
    process = start(recipe, f"output={output}")
    while last_checkpoint(output) is None and process.is_running():
        time.sleep(0.005)
    os.kill(process.processes[1].pid, number)
    log = finish(process, code=143)
    (stopped,) = re.findall(r"stopped after step (\d+) of 32, as asked", log)
    assert last_checkpoint(output) == output / f"checkpoint-{stopped}" and "Traceback" not in log
    finish(start(recipe, f"output={output}"))
    assert_same(unbroken, output)


def test_killed_before_final(unbroken: Path, tmp_path: Path) -> None:
    """All steps are made: what is missing is written, without another step."""
    output = without_final(unbroken, tmp_path / "out")
    report, _ = trained(unbroken / "recipe.yaml", f"output={output}")
    assert_same(unbroken, output)
    whole = json.loads((unbroken / "whole" / "train_report.json").read_text())
    same = ("steps", "final_loss", "data", "skipped_steps", "warnings")
    assert {key: report[key] for key in same} == {key: whole[key] for key in same}
    assert report["evaluation"]["eval_loss"] == whole["evaluation"]["eval_loss"]


def test_a_finished_run_is_left_as_it_is(
    unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, recipe = tmp_path / "out", str(unbroken / "recipe.yaml")
    shutil.copytree(unbroken / "whole", output)
    files = {file: file.stat().st_mtime_ns for file in output.rglob("*") if file.is_file()}
    # of no effect on what was trained
    options = ["--set", f"output={output}", "--set", "monitor.logging_steps=3"]
    assert cli.main(["train", recipe, "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["finished_before"]
    assert "is finished; nothing was run" in finish(start(Path(recipe), f"output={output}"))
    assert cli.main(["train", recipe, *options, "--set", "training.learning_rate=1e-9"]) == 2
    assert "holds a finished run with training.learning_rate 0.001, not 1e-09" in capsys.readouterr().err
    assert cli.main(["train", recipe, *options, "--set", "training.steps=31"]) == 2
    assert (
        "has run 32 steps already, but the recipe asks for 31; raise training.steps"
        in capsys.readouterr().err
    )
    assert files == {file: file.stat().st_mtime_ns for file in output.rglob("*") if file.is_file()}


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_corrupt_checkpoint(damage: str, unbroken: Path, tmp_path: Path) -> None:
    """The run goes on from the one before it; with none left it does not begin anew by itself."""
    output, recipe = without_final(unbroken, tmp_path / "out"), unbroken / "recipe.yaml"

    def harm(step: int) -> Path:
        file = next(
            (output / f"checkpoint-{step}").glob(
                "global_step*/*optim_states.pt" if damage == "truncated" else "rng_state_1.pth"
            )
        )
        file.write_bytes(file.read_bytes()[:-7]) if damage == "truncated" else file.unlink()
        return file

    file = harm(32)
    if damage == "missing":  # both, the second kind of damage in the older one
        harm(28)
        log = finish(start(recipe, f"output={output}"), code=2)
        assert (
            "checkpoint-32 is not complete, nor is any other checkpoint: it lacks rng_state_1.pth; bring it "
            "back, or start anew" in log
        )
        assert (output / "checkpoint-32").exists() and log.count("inplace-ttt train: ") == 1
        return
    report, log = trained(recipe, f"output={output}")
    assert (
        log.count("checkpoint-32 is not complete: ") == 1
        and file.name in log
        and report["resumed_from"].endswith("checkpoint-28")
    )
    assert_same(unbroken, output)


@pytest.mark.full
def test_from_scratch(unbroken: Path, tmp_path: Path) -> None:
    """No old checkpoint outlives it, not even where it was killed in the middle; nothing goes before the run
    can start."""
    output, recipe = tmp_path / "out", unbroken / "recipe.yaml"
    shutil.copytree(unbroken / "whole", output)
    finish(start(recipe, f"output={output}", "data.train=nothing.txt", flags=("--from-scratch",)), code=2)
    assert last_checkpoint(output) is not None and (output / "train_report.json").exists()
    # a kill while old checkpoints are being removed; then without the flag
    (output / ".from-scratch").touch()
    short = ("training.steps=2", "monitor.save_steps=1")
    report, _ = trained(recipe, f"output={output}", *short)
    assert report["resumed_from"] is None and {file.name for file in output.glob("checkpoint-*")} == {
        "checkpoint-1",
        "checkpoint-2",
    }
    assert len(logged(output, "loss")) == 2 and not (output / ".from-scratch").exists()
    log = output / "log.jsonl"
    log.write_text(f'{{"step": 0, "comparison": "before the first step"}}\n{log.read_text()}')
    report, _ = trained(recipe, f"output={output}", *short, "training.seed=7", flags=("--from-scratch",))
    assert (
        report["resumed_from"] is None
        and report["steps"] == 2
        and "before the first step" not in log.read_text()
    )


def test_what_may_change_takes_effect(unbroken: Path, tmp_path: Path) -> None:
    """1e-9 is given at a resume: 1e-9 is used, and reported. So are η, the length of the run, and what the
    monitor does."""
    output = without_final(unbroken, tmp_path / "out")
    surgery = "ttt=null", f"model.path={other_eta(unbroken, tmp_path)}"
    settings = (
        "training.learning_rate=1e-9",
        "training.lr_scheduler=constant",
        "training.steps=34",
        "monitor.save_steps=1",
    )
    report, _ = trained(unbroken / "recipe.yaml", f"output={output}", *settings, *surgery)
    assert logged(output, "learning_rate")[32:] == [1e-9, 1e-9] and (output / "checkpoint-33").exists()
    before, after = weights(unbroken / "whole" / "final"), weights(output / "final")
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-7) for name in before)
    changed = {change["setting"]: (change["from"], change["to"]) for change in report["changes"]}
    assert changed == {
        "training.learning_rate": (1e-3, 1e-9),
        "training.lr_scheduler": ("linear", "constant"),
        "training.steps": (32, 34),
        "ttt.eta": (RIDGE["eta"], 0.5),
    }
    assert (
        all(change["after_step"] == 32 for change in report["changes"])
        and report["recipe"]["training"]["learning_rate"] == 1e-9
    )
    assert config_of(AutoModelForCausalLM.from_pretrained(output / "final")).eta == 0.5


def other_eta(unbroken: Path, folder: Path) -> Path:
    """The same model with another η."""
    shutil.copytree(unbroken / "model", folder / "model")
    file = folder / "model" / "config.json"
    values: dict[str, Any] = json.loads(file.read_text())
    assert values["inplace_ttt"]["config"]["eta"] == RIDGE["eta"]
    values["inplace_ttt"]["config"]["eta"] = 0.5
    file.write_text(json.dumps(values))
    return file.parent


FIXED = {
    "parallel.nproc_per_node=1": "parallel.nproc_per_node x nnodes 2, not 1",
    "model.dtype=bfloat16": "model.dtype 'float32', not 'bfloat16'",
    "training.trainable=ttt": "training.trainable 'all', not 'ttt'",
    "training.seed=1": "training.seed 0, not 1",
    "data.seed=1": "data.seed 0, not 1",
    "data.sequence_length=64": "data.sequence_length 128, not 64",
    "data.validation_documents=3": "data.train.sha256 ",
    "training.batch_size=2": "training.batch_size 1, not 2",
    "deepspeed=2": "deepspeed.zero_optimization.stage 1, not 2",
    "model.window={size: 32}": "model.window.sinks None, not 4, model.window.size None, not 32",
}


@pytest.mark.parametrize(("setting", "said"), FIXED.items(), ids=FIXED)
@pytest.mark.sample(5)
def test_what_may_not_change_is_refused(setting: str, said: str, unbroken: Path, tmp_path: Path) -> None:
    output = without_final(unbroken, tmp_path / "out")
    before = sorted(output.rglob("*"))
    log = finish(start(unbroken / "recipe.yaml", f"output={output}", "training.steps=40", setting), code=2)
    (line,) = (line for line in log.splitlines() if line.startswith("inplace-ttt train: "))
    assert (
        f"checkpoint-32 was trained with {said}" in line
        and "which cannot change within a run; put it back" in line
    )
    assert sorted(output.rglob("*")) == before


def test_two_runs_into_one_output(unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second says so, by whatever launcher it comes, and leaves everything to the first."""
    recipe, output = unbroken / "recipe.yaml", tmp_path / "out"
    with held(load_recipe(recipe, [f"output={output}"]), resume=True):
        assert cli.main(["train", str(recipe), "--set", f"output={output}"]) == 2
        assert "is being written by another run" in capsys.readouterr().err
        log = finish(start(recipe, f"output={output}"), code=2)
        assert log.count("inplace-ttt train: ") == 1 and "is being written by another run" in log
        assert output.exists()
    assert not output.exists()


def test_an_output_that_another_rank_removes(tmp_path: Path) -> None:
    """The first rank removes a folder in which nothing came about while the others still look there for a
    checkpoint."""
    output, looked, interval = tmp_path / "out", threading.Event(), sys.getswitchinterval()

    def come_and_go() -> None:
        while not looked.is_set():
            output.mkdir()
            output.rmdir()

    other = threading.Thread(target=come_and_go)
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        assert all(last_checkpoint(output) is None for _ in range(3000))
    finally:
        looked.set()
        other.join()
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_disk_at_a_save(stage: int, tmp_path: Path) -> None:
    """Files may not grow beyond what the first shards need: one line, exit code 2, no checkpoint called
    complete."""
    recipe = recipe_file(
        tmp_path, checkpoint(tmp_path / "model"), documents(tmp_path / "text"), deepspeed=stage
    )
    # so that its cache is there
    build_data(load_recipe(recipe), AutoTokenizer.from_pretrained(tmp_path / "model"), CHUNK)
    log = finish(start(recipe, largest_file=20_000), code=2)
    assert "inplace-ttt train: cannot save" in log and "free some space" in log
    assert last_checkpoint(tmp_path / "out") is None and not (tmp_path / "out" / "final").exists()

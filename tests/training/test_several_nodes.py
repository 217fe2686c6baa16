"""Processes that see no common disk, as those of several nodes may: each in a folder of its own, all with the
same recipe."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.training.loop.checkpoints import last_checkpoint
from inplace_ttt.training.recipe.recipe import load_recipe
from inplace_ttt.training.run.launch import launch
from inplace_ttt.training.run.worker import meet

from .forked import Forked
from .runs import checkpoint, documents, environments, finish, one_process, recipe_file, weights
from .runs import start as run


def one_node(arguments: list[str]) -> int:
    """One process, in the folder of its node."""
    os.chdir(os.environ["NODE"])
    return one_process(arguments)


def start(file: Path, nodes: list[Path], *settings: str, flags: tuple[str, ...] = ()) -> Forked:
    """A process on each node."""
    told = environments(len(nodes))
    for environment, node in zip(told, nodes, strict=True):
        environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE": str(node)}
    arguments = [str(file), *flags, *(part for setting in settings for part in ("--set", setting))]
    return Forked(functools.partial(one_node, arguments), told)


@pytest.fixture(params=[1, 3], ids=["zero1", "zero3"])
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Eight steps, whose output is a folder of each node."""
    sections = {
        "training": {"steps": 8},
        "parallel": {"nproc_per_node": 2},
        "output": "out",
        "deepspeed": request.param,
    }
    monitor = {"save_steps": 2, "save_total_limit": 2}
    return recipe_file(
        tmp_path, checkpoint(tmp_path / "model"), documents(tmp_path / "text"), monitor=monitor, **sections
    )


@pytest.mark.sample(1)
def test_each_node_keeps_what_its_processes_need(recipe: Path, tmp_path: Path) -> None:
    """Checkpoints and their rotation on every disk; what one lacks, or has of other processes, is not gone on
    from."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    finish(start(recipe, nodes))
    kept = [{folder.name for folder in (node / "out").glob("checkpoint-*")} for node in nodes]
    assert kept == [{"checkpoint-6", "checkpoint-8"}] * 2 and not (nodes[1] / "out" / "final").exists()
    whole = weights(nodes[0] / "out" / "final")
    assert "is finished; nothing was run" in finish(start(recipe, nodes[::-1]))
    shutil.rmtree(nodes[0] / "out" / "final")
    log = finish(start(recipe, nodes[::-1]), code=2)
    (line,) = (line for line in log.splitlines() if line.startswith("inplace-ttt train: "))
    assert (
        "checkpoint-8 is not complete, nor is any other" in line and "give each node the rank it had" in line
    )
    shutil.rmtree(nodes[1] / "out" / "checkpoint-8")

    log = finish(start(recipe, nodes))
    assert (
        log.count("checkpoint-8 is not complete: on ") == 1
        and "which process 1 reads from, it is not there; the run continues from" in log
    )
    report = json.loads((nodes[0] / "out" / "train_report.json").read_text())
    assert report["resumed_from"].endswith("checkpoint-6") and report["steps"] == 8
    again = weights(nodes[0] / "out" / "final")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)

    shutil.rmtree(nodes[0] / "out" / "final")
    for folder in (nodes[1] / "out").glob("checkpoint-*"):
        (folder / "rng_state_1.pth").unlink()
    log = finish(start(recipe, nodes), code=2)
    (line,) = (line for line in log.splitlines() if line.startswith("inplace-ttt train: "))
    assert (
        "checkpoint-8 is not complete, nor is any other checkpoint: on " in line
        and "which process 1 reads from, it lacks rng_state_1" in line
    )
    finish(start(recipe, nodes, "training.steps=1", flags=("--from-scratch",)))
    assert all(last_checkpoint(node / "out") == node / "out" / "checkpoint-1" for node in nodes)


def test_a_refusal_on_another_node_is_said(tmp_path: Path) -> None:
    """Once, by the process that knows, and with its exit code; the others neither wait nor speak."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    documents(nodes[0] / "text")
    recipe = recipe_file(
        tmp_path, checkpoint(tmp_path / "model"), Path("text"), output="out", parallel={"nproc_per_node": 2}
    )
    log = finish(start(recipe, nodes), code=2)
    (line,) = (line for line in log.splitlines() if line.startswith("inplace-ttt train: "))
    assert "text" in line and "Traceback" not in log, log


def by_srun(recipe: Path, node: Path) -> subprocess.Popen[str]:
    """`srun inplace-ttt train recipe.yaml --json` as it is on one node."""
    command = [sys.executable, "-m", "inplace_ttt.cli", "train", str(recipe), "--json"]
    known = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_PROCID": node.name}
    return subprocess.Popen(
        command, cwd=node, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_torchrun_on_each_node(tmp_path: Path) -> None:
    """Two nodes of one machine and no common disk train what one does; the same command again changes
    nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    model, text = checkpoint(tmp_path / "model"), documents(tmp_path / "text")
    finish(
        run(recipe_file(tmp_path, model, text, parallel={"nproc_per_node": 2}, output=str(tmp_path / "one")))
    )
    parallel = {"nnodes": 2, "launcher": "torchrun", "rdzv_endpoint": rendezvous}
    recipe = recipe_file(tmp_path, model, text, parallel=parallel, output="out")
    for finished_before in (False, True):
        nodes = [tmp_path / "0", tmp_path / "1"]
        commands = []
        for node in nodes:
            node.mkdir(exist_ok=True)
            commands.append(by_srun(recipe, node))
        said = [command.communicate(timeout=300) for command in commands]
        assert [command.returncode for command in commands] == [0, 0], said
        (report,) = (found for found in (json.loads(out) for out, _ in said) if found["output"] is not None)
        assert report["steps"] == 3 and report["finished_before"] == finished_before
    (final,) = tmp_path.glob("[01]/out/final")
    here, there = weights(tmp_path / "one" / "final"), weights(final)
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"nnodes": 2, "launcher": "torchrun"}, r"several nodes need parallel\.rdzv_endpoint"),
        ({"launcher": "torchrun", "rdzv_endpoint": "node1"}, r"parallel\.rdzv_endpoint: must be HOST:PORT"),
        (
            {"rdzv_endpoint": "node1:29500"},
            r"parallel\.rdzv_endpoint: does nothing without launcher: torchrun",
        ),
        (
            {"launcher": "torchrun", "hostfile": "hosts"},
            r"parallel\.hostfile: does nothing with launcher: torchrun",
        ),
        ({"launcher": "slurm"}, "parallel.launcher"),
    ],
)
def test_what_a_launcher_cannot_use(parallel: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InPlaceTTTError, match=reason):
        launch(
            load_recipe(recipe_file(tmp_path, tmp_path / "model", tmp_path / "text", parallel=parallel)), []
        )


def test_srun_alone_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(recipe_file(tmp_path, tmp_path / "model", tmp_path / "text"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(InPlaceTTTError, match="let it start inplace-ttt train, once per node"):
        meet(recipe)

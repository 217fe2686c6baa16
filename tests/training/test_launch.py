"""`inplace-ttt train` and its processes, from the command's start to its end."""

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.training import __main__ as process
from inplace_ttt.training.loop.checkpoints import last_checkpoint
from inplace_ttt.training.loop.meeting import Meeting
from inplace_ttt.training.loop.stopping import LAUNCHER, end_with_launcher
from inplace_ttt.training.run import launch

from .forked import Forked
from .recipes import tiny_recipe, write_recipe
from .runs import checkpoint, documents, finish, logged, recipe_file, start


def test_sigterm_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    """The command itself: exit code 143, no process left, and the next start goes on."""
    sections = {
        "training": {"steps": 5000, "gradient_accumulation_steps": 1},
        "parallel": {"nproc_per_node": 2},
        "monitor": {"save_steps": 1000},
    }
    recipe = recipe_file(tmp_path, checkpoint(tmp_path / "model"), documents(tmp_path / "text"), **sections)
    output, said = tmp_path / "out", tmp_path / "said"
    with said.open("w") as log:
        command = subprocess.Popen(
            [sys.executable, "-m", "inplace_ttt.cli", "train", str(recipe)], stdout=log, stderr=log
        )
    try:
        while command.poll() is None and not (output / "log.jsonl").exists():
            time.sleep(0.02)
        children = psutil.Process(command.pid).children(recursive=True)
        assert len(children) == 2, said.read_text()[-3000:]
        command.terminate()
        assert command.wait(60) == 143
        assert psutil.wait_procs(children, timeout=1)[1] == []
    finally:
        command.kill()
        command.wait()
    found = last_checkpoint(output)
    assert found is not None
    done = int(found.name.removeprefix("checkpoint-"))
    assert f"stopped after step {done} of 5000, as asked" in said.read_text()
    finish(start(recipe, f"training.steps={done + 2}", "monitor.logging_steps=1"))
    assert logged(output, "step")[-2:] == [done + 1, done + 2]


def launcher(file: str) -> None:
    """A process with a child that watches over it, which writes its number."""
    os.environ[LAUNCHER] = str(os.getpid())
    if os.fork() == 0:
        end_with_launcher()
        Path(file).write_text(str(os.getpid()))
    time.sleep(100)


def test_its_processes_end_with_it(tmp_path: Path) -> None:
    """kill -9 of the command alone, which can pass nothing on."""
    file = tmp_path / "child"
    run = Forked(functools.partial(launcher, str(file)), [{}])
    while not file.exists() or not file.read_text():
        time.sleep(0.02)
    child = psutil.Process(int(file.read_text()))
    run.kill()
    assert psutil.wait_procs([child], timeout=5)[1] == []


def test_a_lock_that_a_killed_build_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any process starts: DeepSpeed would wait for it without end."""
    lock = tmp_path / "builds" / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert launch.launch(tiny_recipe(tmp_path), []) == 1
    assert f"{lock} is the lock of a build" in caplog.text


def test_one_that_fails_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its exit code is the run's, whichever it is; the others get a moment, and no more."""
    monkeypatch.setattr(launch, "_GRACE", 0.5)
    for failing, code in (("exit 2", 2), ("kill -9 $$", 137)):
        began = time.monotonic()
        assert (
            launch._run_all([(["sh", "-c", line], os.environ) for line in ("sleep 100", "true", failing)])
            == code
        )
        assert time.monotonic() - began < 5
    assert "process 2 of the run was ended by SIGKILL" in caplog.text


def test_several_nodes_are_those_of_the_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    parallel: dict[str, Any] = {"nproc_per_node": 4, "nnodes": 2}
    with pytest.raises(InPlaceTTTError, match=r"2 nodes need parallel\.hostfile, or launcher: torchrun"):
        launch.launch(tiny_recipe(tmp_path, parallel=parallel), [])
    recipe = tiny_recipe(tmp_path, parallel={**parallel, "hostfile": "hosts"})
    line = launch.by_deepspeed(recipe, ["tiny.yaml"])
    wanted = [
        "--hostfile",
        str(tmp_path / "hosts"),
        "--num_nodes",
        "2",
        "--num_accelerators",
        "4",
        "--module",
        "inplace_ttt.training",
        "tiny.yaml",
    ]
    assert line[-9:] == wanted


@pytest.mark.parametrize("where", ["load_recipe", "run"])
def test_what_nobody_foresaw_is_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("nobody")

    def met(_: Any) -> Meeting:
        return Meeting(HashStore(), 0, 1)

    monkeypatch.setattr(process, "meet", met)
    monkeypatch.setattr(process, where, fails)
    monkeypatch.setattr(process, "end_with_launcher", lambda: None)
    monkeypatch.setattr(sys, "argv", ["training", str(write_recipe(tmp_path))])
    assert process.main() == 2
    line = (
        "inplace-ttt train: unexpected KeyError: KeyError: 'nobody'; set INPLACE_TTT_TRACEBACK=1 to see "
        "where, and please report it."
    )
    assert capsys.readouterr().err.splitlines() == [line]

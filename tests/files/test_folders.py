"""Outputs are whole under their name at every moment, have one writer, and replace nobody else's files."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.files import folders
from inplace_ttt.files.folders import new_file, new_folder
from inplace_ttt.files.locks import output_lock
from inplace_ttt.files.manifest import DIAGNOSIS, EVALUATION, MANIFEST


def write(path: Path, text: str, overwrite: bool = False) -> None:
    with new_folder(path, DIAGNOSIS, overwrite=overwrite) as folder:
        (folder / "mark").write_text(text)
        (folder / "more.txt").write_text(text)


def held(path: Path) -> set[str]:
    """What the files of a folder say, which is one thing if it is whole."""
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, "mark", "more.txt"]
    return {file.read_text() for file in path.iterdir() if file.name != MANIFEST}


def in_another_process(work: Callable[[], object]) -> int:
    """The status of a fork that does it: 0, 1 for an InPlaceTTTError, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except InPlaceTTTError:
            os._exit(1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(step: int, out: Path, exchanges: bool) -> int:
    """Write `out` in a process that is killed before, or after, one of its steps on the file system."""
    count = 0

    def stepwise(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            result = None
            for after in (False, True):
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                result = result if after else function(*args, **kwargs)
            return result

        return wrapped

    def work() -> None:
        folders.exchange = stepwise(folders.exchange if exchanges else lambda one, other: False)
        for module, names in ((os, ("rename", "mkdir", "unlink", "rmdir")), (shutil, ("rmtree",))):
            for name in names:
                setattr(module, name, stepwise(getattr(module, name)))
        write(out, "new", overwrite=True)

    return in_another_process(work)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_step_leaves_a_whole_output(exchanges: bool, tmp_path: Path) -> None:
    """Without the exchange of names there is one step without the name, after which the next writer puts the
    old output back."""
    done, without_name = False, 0
    for step in range(60):
        out = tmp_path / str(step) / "out"
        write(out, "old")
        status = killed_at(step, out, exchanges)
        if done := status == 0:
            break
        assert status == -signal.SIGKILL
        if not out.exists():
            without_name += 1
            with pytest.raises(InPlaceTTTError, match="exists already"):
                write(out, "newer")
        assert held(out) in ({"old"}, {"new"}), step
        write(out, "newer", overwrite=True)
        assert held(out) == {"newer"} and [entry.name for entry in out.parent.iterdir()] == ["out"], (
            "what was left is cleared away"
        )
    assert done and step > 8
    assert without_name == 0 if exchanges else without_name > 0


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_output_is_replaced_whole(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    for text in ("old", "new"):
        write(tmp_path / "out", text, overwrite=True)
        assert held(tmp_path / "out") == {text}
    with pytest.raises(InPlaceTTTError, match="exists already; choose another name, or pass --overwrite"):
        write(tmp_path / "out", "newer")
    link = tmp_path / "link"
    link.symlink_to("out")
    write(link, "through a link", overwrite=True)
    assert link.is_symlink() and held(tmp_path / "out") == {"through a link"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"out", "link"}


@pytest.mark.parametrize(
    "kind", ["another's", "a file beside", "a folder in it", "here", "above", "root", "file", "dangling"]
)
def test_nothing_of_anybody_elses_is_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"
    write(out, "old")
    if kind == "another's":
        (out / MANIFEST).unlink()
    elif kind == "a file beside":
        (out / "thesis.tex").write_text("")
    elif kind == "a folder in it":
        (out / "x.txt").mkdir()
    monkeypatch.chdir(out)
    if kind in ("file", "dangling"):
        out = tmp_path / kind
        out.write_text("") if kind == "file" else out.symlink_to(tmp_path / "nowhere" / "x")
    path = {"here": Path("."), "above": Path(".."), "root": Path("/")}.get(kind, out)
    if kind not in ("here", "above"):
        monkeypatch.chdir("/")
    before = sorted(tmp_path.rglob("*"))
    if kind == "dangling":
        write(path, "new", overwrite=True)  # a link to nothing is a name to write to
        assert held(tmp_path / "nowhere" / "x") == {"new"}
        return
    with pytest.raises(InPlaceTTTError, match="choose another name"):
        write(path, "new", overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("out")
    with new_folder(tmp_path / "out", DIAGNOSIS) as folder:
        (folder / "a").write_text("")
        for name in ("out", "link", "../" + tmp_path.name + "/out"):
            with pytest.raises(InPlaceTTTError, match="is being written by another run; wait for its end"):
                write(tmp_path / name, "other")
        assert in_another_process(lambda: write(tmp_path / "out", "other")) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "out"]


def test_a_lock_is_handed_on_and_leaves_no_file(tmp_path: Path) -> None:
    """Many threads, each with its turn."""
    inside, most, turns = 0, 0, []

    def turn() -> None:
        nonlocal inside, most
        for _ in range(20):
            with output_lock(tmp_path / "x", wait=True):
                inside += 1
                most = max(most, inside)
                turns.append(1)
                time.sleep(0.001)  # so that another one could come in
                inside -= 1

    threads = [threading.Thread(target=turn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, len(turns), list(tmp_path.iterdir())) == (1, 160, [])


def test_a_file_is_replaced_whole_and_nothing_else_is(tmp_path: Path) -> None:
    out = tmp_path / "a"
    for text in ("old", "new"):
        with new_file(out, ours=True) as file:
            file.write_text(text)
    with pytest.raises(ZeroDivisionError), new_file(out, ours=True) as file:
        file.write_text(f"half {1 / 0}")
    assert out.read_text() == "new" and [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert out.stat().st_mode & 0o777 == 0o666 & ~(os.umask(0o22) | os.umask(0o22))
    (tmp_path / "link").symlink_to("a")
    with new_file(tmp_path / "link", ours=True) as file:
        file.write_text("through")
    assert (tmp_path / "link").is_symlink() and out.read_text() == "through"
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe", tmp_path):
        with pytest.raises(InPlaceTTTError, match="not a file"), new_file(path, ours=True) as file:
            file.write_text("")
    assert Path("/dev/null").is_char_device() and (tmp_path / "pipe").is_fifo()


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """And not the place that is written, or its disk."""
    gone = tmp_path / "elsewhere" / "tokenizer.json"
    reads = r"out, which needs .*elsewhere/tokenizer\.json: No such file or directory\.$"
    with (
        pytest.raises(InPlaceTTTError, match=reads),
        new_folder(tmp_path / "to" / "out", EVALUATION) as folder,
    ):
        shutil.copyfile(gone, folder / "tokenizer.json")
    writes = r"out: No such file or directory; free some space or choose another place\.$"
    with (
        pytest.raises(InPlaceTTTError, match=writes),
        new_folder(tmp_path / "to" / "out", EVALUATION) as folder,
    ):
        (folder / "deeper" / "tokenizer.json").write_text("")

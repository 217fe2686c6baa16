"""The wheel and the source distribution, built by the backend that pyproject.toml names, hold what they
should and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import tiny

import inplace_ttt

ROOT = Path(__file__).parent.parent
VERSION = inplace_ttt.__version__
LEFT_BY_WORK = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")


@dataclass(frozen=True)
class Built:
    """The source distribution of a tree, and the files of two wheels: from the tree, and from the source
    distribution."""

    source: Path
    files: dict[str, bytes]
    files_from_source: dict[str, bytes]

    def metadata(self, name: str = "METADATA") -> Message:
        return message_from_bytes(self.files[f"inplace_ttt-{VERSION}.dist-info/{name}"])


def build(tree: Path, out: Path, what: str) -> Path:
    """What a front end such as `build` or pip asks of the backend, in a process for each, as PEP 517 has it;
    `what` is wheel or sdist."""
    code = f"import sys, setuptools.build_meta as backend; print(backend.build_{what}(sys.argv[1]))"
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """From a copy, so that nothing is left in the tree and nothing in it from other builds."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_BY_WORK))
    source, wheel = (build(folder / "tree", folder / "dist", what) for what in ("sdist", "wheel"))
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    again = build(folder / f"inplace_ttt-{VERSION}", folder / "again", "wheel")
    return Built(source, contents(wheel), contents(again))


def test_the_wheel_holds_the_package_whole_and_nothing_else(built: Built) -> None:
    expected = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "inplace_ttt").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {
        "inplace_ttt/py.typed",
        "inplace_ttt/kernels/walk.py",
        "inplace_ttt/reports/templates/audit.html.j2",
    } <= expected
    info = f"inplace_ttt-{VERSION}.dist-info/"
    assert {name for name in built.files if not name.startswith(info)} == expected
    assert built.files[f"{info}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_source_distribution_gives_the_same_wheel(built: Built) -> None:
    assert built.files == built.files_from_source


def test_the_source_distribution_leaves_out_what_only_the_repository_needs(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    setuptools_own = {"PKG-INFO", "setup.cfg", "inplace_ttt.egg-info"}
    own = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "inplace_ttt"}
    assert top == setuptools_own | own


def test_metadata(built: Built) -> None:
    about = built.metadata()
    assert (about["Name"], about["Version"], about["License-Expression"]) == (
        "inplace-ttt",
        VERSION,
        "Apache-2.0",
    )
    assert about["Requires-Python"] == ">=3.11"
    assert about.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.match(r"[\w-]+", line)[0] for line in needed] == ["torch", "transformers"], (
        "the base install stays small"
    )
    assert built.metadata("WHEEL")["Root-Is-Purelib"] == "true"
    assert (
        b"inplace-ttt = inplace_ttt.cli:main"
        in built.files[f"inplace_ttt-{VERSION}.dist-info/entry_points.txt"]
    )


@pytest.mark.full
def test_the_wheel_works_without_the_repository(built: Built, tmp_path: Path) -> None:
    for name, data in built.files.items():
        file = tmp_path / "installed" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    tiny.save_llama(tmp_path / "base", tiny.tokenizer(), num_hidden_layers=3, num_attention_heads=4)
    code = """
import inplace_ttt
from inplace_ttt.cli import main
from inplace_ttt.reports.page import render
print(inplace_ttt.__file__, inplace_ttt.__version__, sep="\\n")
print("<html" in render("page.html.j2", title="A title", good=True), main(["convert", "base", "out", "--layers", "0", "--json"]))
"""
    env = {"PYTHONPATH": str(tmp_path / "installed"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    package, version, *_, last = done.stdout.splitlines()
    assert Path(package).is_relative_to(tmp_path)
    assert (version, last) == (VERSION, "True 0")


def test_the_changelog_has_the_version() -> None:
    """Between releases `__version__` ends in .dev0 and the newest section is Unreleased; a release has a
    section of its number and day."""
    headings = re.findall(
        r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    released = [
        re.fullmatch(r"(\d+\.\d+\.\d+), \d{4}-\d\d-\d\d", heading)
        for heading in headings
        if heading != "Unreleased"
    ]
    assert all(released), headings
    if VERSION.endswith(".dev0"):
        assert headings[0] == "Unreleased"
        assert VERSION.removesuffix(".dev0") not in [match[1] for match in released if match]
    else:
        assert headings[0].startswith(f"{VERSION}, "), (
            f"CHANGELOG.md has no section {VERSION}, as CONTRIBUTING says a release has"
        )


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")

"""The names of docs/api.md have complete docstrings in Google style, and their examples run.

The examples of a class's methods go on from the class's own example. Every example runs in an empty folder.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.accelerator import get_accelerator
from torch import distributed
from transformers.utils import logging

import inplace_ttt
from inplace_ttt.audit import AuditedModule
from inplace_ttt.clients.settings import settings_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PLUGIN = "inplace_ttt.clients.axolotl.InPlaceTTTPlugin"
ABSENT = {PLUGIN, "inplace_ttt.clients.llamafactory.run", "inplace_ttt.clients.swift.register"}
"""Names that only import beside other people's trainers; the environment of the tests lacks those."""
NAMES = [name for name in re.findall(r"^::: (\S+)$", PAGE, flags=re.MULTILINE) if name not in ABSENT]
INTERFACES = (AuditedModule,)
"""Classes to derive from: the class's example shows the methods together."""
SLOW = {
    f"inplace_ttt.{name}" for name in ("audit.audit_model", "diagnostics.write_report", "InPlaceTTTCallback")
}
"""Names whose examples take half of the time; they audit, draw and train, which other tests of the gate do
too."""
SKIPPED_AT_MOST = 1 / 3


@dataclasses.dataclass(frozen=True)
class Documented:
    """A public object with its docstring."""

    name: str
    value: Any
    needs_example: bool = True

    @property
    def text(self) -> str:
        return inspect.cleandoc(self.value.__doc__ or "")

    def section(self, heading: str) -> str | None:
        """The text under a heading, without its indent; None if there is no such heading."""
        found = re.search(rf"^{heading}:\n((?:    .*\n|\n)+)", f"{self.text}\n", flags=re.MULTILINE)
        return found and inspect.cleandoc(found[1])

    def entries(self, heading: str) -> set[str]:
        """Names of the entries under a heading."""
        return {*re.findall(r"^(\w+): ", self.section(heading) or "", flags=re.MULTILINE)}


def found(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def described(kind: type) -> list[type]:
    """The class, and the package's classes that it derives from, up to the first one that the page lists."""
    listed = [found(name) for name in NAMES]
    parents = [parent for parent in kind.__mro__[1:] if parent.__module__.startswith("inplace_ttt")]
    return [kind, *itertools.takewhile(lambda parent: parent not in listed, parents)]


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods of the described classes; those that a further parent describes are left out."""
    for each in described(kind):
        for name, value in vars(each).items():
            function = getattr(value, "__func__", value)
            function = getattr(function, "__wrapped__", function)
            inherited = any(hasattr(parent, name) for parent in each.__mro__[1:])
            if inspect.isfunction(function) and not name.startswith("_") and not inherited:
                yield name, function


def documented(name: str) -> list[Documented]:
    """The object of that name, and its public methods."""
    value = found(name)
    own = methods(value) if inspect.isclass(value) else ()
    return [
        Documented(name, value),
        *(Documented(f"{name}.{method}", each, value not in INTERFACES) for method, each in own),
    ]


def parameters(value: Any) -> set[str]:
    if inspect.isclass(value) and issubclass(value, Exception):
        return set()
    return {*inspect.signature(value).parameters} - {"self", "cls", "args"}


def returns(value: Any) -> bool:
    return not inspect.isclass(value) and inspect.signature(value).return_annotation not in (None, "None")


EVERYTHING = [each for name in NAMES for each in documented(name)]


def faults(each: Documented) -> list[str]:
    """Everything that a docstring lacks."""
    first, found = each.text.partition("\n")[0], []
    if not re.match(r"[A-Z]\w+ .*[.:]$", first) or first.startswith(("Returns ", "The ", "A ")):
        found.append(f"the first line is no sentence that begins with a verb: {first!r}")
    given, named = parameters(each.value), each.entries("Args")
    either = named | each.entries("Attributes") if dataclasses.is_dataclass(each.value) else named
    if not inspect.isabstract(each.value):
        found += [f"Args lack {name}" for name in sorted(given - either)]
        found += [f"the signature lacks {name}" for name in sorted(named - given)]
    if returns(each.value) and not (each.section("Returns") or each.section("Yields")):
        found.append("there is no section Returns")
    if each.needs_example and ">>> " not in (each.section("Examples") or ""):
        found.append("there is no example")
    return found


@pytest.mark.parametrize("each", EVERYTHING, ids=lambda each: each.name)
def test_a_docstring_is_complete(each: Documented) -> None:
    assert faults(each) == []


def test_an_incomplete_docstring_is_found() -> None:
    def halved(x: int, by: int = 2) -> int:
        """Returns a part of a number.

        Args:
            x: the number.
            y: nothing.
        """
        return x // by

    assert [fault.partition(":")[0] for fault in faults(Documented("halved", halved))] == [
        "the first line is no sentence that begins with a verb",
        "Args lack by",
        "the signature lacks y",
        "there is no section Returns",
        "there is no example",
    ]


def examples(each: Documented) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(each.text, {"__name__": "examples"}, each.name, None, None)


@pytest.fixture(scope="module", autouse=True)
def _deepspeed_has_logged() -> None:
    """DeepSpeed logs its accelerator to stdout, once, when transformers saves a model."""
    get_accelerator()


@pytest.mark.parametrize(
    "public", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in NAMES]
)
def test_the_examples_run(public: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object's own example, and each method's after a new run of it."""
    monkeypatch.chdir(tmp_path)
    logging.disable_progress_bar()
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    own, *others = documented(public)
    try:
        runner.run(examples(own), out=report.append)
        for test in filter(lambda test: test.examples, map(examples, others)):
            before = examples(own)
            runner.run(before, out=report.append, clear_globs=False)
            test.globs = before.globs
            runner.run(test, out=report.append)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    assert not runner.failures, "".join(report)


def test_few_examples_are_skipped() -> None:
    lines = [line for each in EVERYTHING for line in examples(each).examples]
    skipped = [line for line in lines if line.options.get(doctest.SKIP)]
    assert len(lines) > 100 and len(skipped) <= SKIPPED_AT_MOST * len(lines)


def test_the_plugin_for_axolotl_shows_settings_that_it_takes() -> None:
    """It is read as text, since its module imports Axolotl."""
    tree = ast.parse((ROOT / "inplace_ttt" / "clients" / "axolotl.py").read_text(encoding="utf-8"))
    (kind,) = (node for node in tree.body if getattr(node, "name", None) == "InPlaceTTTPlugin")
    shown = yaml.safe_load((ast.get_docstring(kind) or "").partition("lines:\n")[2])
    assert shown["plugins"] == [PLUGIN] and settings_of(shown["inplace_ttt"]).ttt is not None


def test_every_public_name_is_checked() -> None:
    assert {f"inplace_ttt.{name}" for name in inplace_ttt.__all__} - {"inplace_ttt.__version__"} <= {*NAMES}

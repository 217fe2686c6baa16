"""The gate, `make test`: every law and every kind of case, in a few minutes. `make test-all` runs every case.

A test marked `full` is not in the gate. Of a test marked `sample(n)` the gate runs n cases. Of other
parametrized tests it runs as few cases as hold, together, every value of each parameter, and every pair of
values where there are three parameters or more. Of a test over model families it runs at most `MOST` cases;
which ones differs from test to test, so that together they meet every family.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from families import BY_NAME
from vision_language import CONFIGS

BUDGET = {
    "audit": 130,
    "calibration": 20,
    "checkpoint": 190,
    "cli": 70,
    "diagnostics": 60,
    "docs": 160,
    "evaluation": 300,
    "files": 10,
    "triton_kernels": 110,
    "laws": 260,
    "memories": 15,
    "real": 25,
    "reports": 5,
    "session": 80,
    "tasks": 10,
    "tests": 90,
    "texts": 10,
    "tools": 30,
    "training": 480,
    "transformers_mixins": 15,
}
"""Seconds that the tests of a folder may take in the gate, added over processes, on two cores of 2.5 GHz."""


MOST = 5
"""Cases that the gate runs of a test over model families."""

NAMES_OF_FAMILIES = {*BY_NAME, *CONFIGS}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gate",
        action="store_true",
        help="run every law and each kind of case alone; print the time per folder",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("gate"):
        return
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("full") is None:
            grids[item.nodeid.partition("[")[0]].append(item)
    kept = {id(item) for cases in grids.values() for item in _of_grid(cases)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _of_grid(cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
    if mark := cases[0].get_closest_marker("sample"):
        return cases[:: -(-len(cases) // mark.args[0])]
    values = [_values(case) for case in cases]
    if len(values[0]) > 2:
        return [cases[index] for index in covering(values, strength=2)]
    chosen = covering(values, strength=1)
    if is_over_families([_params(case) for case in cases]):
        chosen = spread(chosen, MOST, cases[0].name.partition("[")[0])
    return [cases[index] for index in chosen]


def is_over_families(cases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a parameter of the cases has names of model families alone as its values.

    Example:
        >>> is_over_families([{"family": "llama"}, {"family": "gpt2"}]), is_over_families([{"name": "qa1"}])
        (True, False)
    """
    return any(
        all(isinstance(case[name], str) and case[name] in NAMES_OF_FAMILIES for case in cases)
        for name in cases[0]
    )


def _params(case: pytest.Item) -> Mapping[str, Any]:
    return getattr(getattr(case, "callspec", None), "params", {})


def _values(case: pytest.Item) -> tuple[str, ...]:
    """The name of the value that each `parametrize` gives the case."""
    callspec = getattr(case, "callspec", None)
    # pytest has no public way; the joined name alone cannot be split
    return () if callspec is None else tuple(callspec._idlist)


def covering(cases: Sequence[tuple[Any, ...]], strength: int) -> list[int]:
    """Indices of cases that hold, together, all combinations of so many values that any case holds.

    The case that adds most comes first. A test of one parameter keeps all of its cases.

    Example:
        >>> covering([(0, 0), (0, 1), (1, 0), (1, 1)], strength=1)
        [0, 3]
    """
    wanted = [set(_combinations(case, strength)) for case in cases]
    missing = set().union(*wanted)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(wanted[index] & missing))
        chosen.append(best)
        missing -= wanted[best]
    return sorted(chosen) or list(range(len(cases)))


def spread(indices: Sequence[int], most: int, name: str) -> list[int]:
    """At most so many of the indices, as far apart as they can be; the name of the test decides where they
    begin.

    Example:
        >>> spread(range(6), 3, "a"), spread(range(6), 3, "b"), spread(range(2), 3, "a")
        ([1, 3, 5], [0, 2, 4], [0, 1])
    """
    if len(indices) <= most:
        return list(indices)
    first = sum(name.encode()) % len(indices)
    return sorted(indices[(first + place * len(indices) // most) % len(indices)] for place in range(most))


def _combinations(case: tuple[Any, ...], strength: int) -> Iterator[Any]:
    return itertools.combinations(enumerate(case), min(strength, len(case)))


class Clock:
    """Adds the seconds of tests by folder, and names the folders that are over their budgets.

    On a slower machine every folder may take more, by as much as all of them together do. The clock fails no
    test: processors differ in their instructions, so that one folder can be slower than the others.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = Path(report.nodeid.partition("::")[0]).parent.name
        self.seconds[folder] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("seconds per folder")
        for folder, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"{seconds:6.0f} of {BUDGET.get(folder, 0):4} {folder}")
        for folder in self.over():
            terminalreporter.write_line(
                f"tests/{folder} is over its budget of tests/gate.py: make its tests faster, or mark some "
                "`full`"
            )

    def over(self) -> list[str]:
        slower = max(1.0, sum(self.seconds.values()) / sum(BUDGET.values()))
        return [
            folder for folder, seconds in self.seconds.items() if seconds > slower * BUDGET.get(folder, 0)
        ]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("gate") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Clock())

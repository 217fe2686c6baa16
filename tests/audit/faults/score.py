"""How many of the faults the audit catches, and how many under an item that may name them: `python -m
audit.faults.score`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import held_out_faults, open_faults
from .caught import caught
from .fault import Fault


@dataclass(frozen=True)
class Verdict:
    """A fault, and the items that named it."""

    fault: Fault
    items: tuple[str, ...]

    @property
    def is_caught(self) -> bool:
        return bool(self.items)

    @property
    def is_rightly_named(self) -> bool:
        return not self.fault.owners.isdisjoint(self.items)


def score(faults: Sequence[Fault]) -> list[Verdict]:
    """Every fault, planted and audited, one after the other."""
    verdicts = []
    for done, fault in enumerate(faults):
        if sys.stderr.isatty():
            print(f"\r{done} of {len(faults)}", end="", file=sys.stderr)
        verdicts.append(Verdict(fault, tuple(caught(fault))))
    return verdicts


def table(verdicts: Sequence[Verdict], title: str, group: Callable[[Fault], str]) -> str:
    """A line for each group, and one for all."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(group(verdict.fault), []).append(verdict)
    lines = [f"{title:48} {'faults':>6} {'caught':>7} {'rightly':>7}"]
    return "\n".join([*lines, *(_line(name, part) for name, part in groups.items()), _line("all", verdicts)])


def _line(name: str, verdicts: Sequence[Verdict]) -> str:
    n, seen, named = (
        len(verdicts),
        sum(v.is_caught for v in verdicts),
        sum(v.is_rightly_named for v in verdicts),
    )
    return f"{name:48} {n:6} {seen / n:7.0%} {named / n:7.0%}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m audit.faults.score", description=__doc__)
    parser.add_argument("--held-out", action="store_true", help="the third that probes are not made for")
    parser.add_argument("--by-kind", action="store_true", help="a line for each kind, too")
    parser.add_argument(
        "--missed",
        action="store_true",
        help="name the faults that are missed, and those that others' items name",
    )
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    verdicts = score(held_out_faults() if args.held_out else open_faults())
    if args.missed:
        for verdict in verdicts:
            if not verdict.is_caught:
                print(
                    f"missed: {verdict.fault.name} ({verdict.fault.place}; "
                    f"{', '.join(sorted(verdict.fault.owners))})"
                )
            elif not verdict.is_rightly_named:
                print(
                    f"named by {', '.join(verdict.items)}: {verdict.fault.name} (not by "
                    f"{', '.join(sorted(verdict.fault.owners))})"
                )
    if args.by_kind:
        print(table(verdicts, "by kind", lambda fault: fault.kind))
    print(table(verdicts, "by place", lambda fault: fault.place))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

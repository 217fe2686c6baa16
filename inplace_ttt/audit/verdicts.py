"""Runs the probes of items one by one, and collects the verdicts for a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InPlaceTTTError, one_line
from .blame import is_the_probes
from .item import Item, Probe, known
from .outcome import NotChecked, Outcome, Verdict
from .report import Declaration, Report, Result

Progress = Callable[[int, int, str], None]
"""Called before each item with the number of items done, the number of all items, and the title."""

_OF_ABSENT: dict[Verdict, Verdict] = {
    "conforms": "extension",
    "deviates": "conforms",
    "unspecified": "conforms",
}


class Auditor:
    """Decides items one by one and collects their results."""

    def __init__(
        self,
        name: str,
        profile: str,
        declared: Sequence[Declaration],
        items: Sequence[Item],
        progress: Progress | None,
    ) -> None:
        self.name, self.profile, self.items, self.progress = name, known(profile), items, progress
        self.declared = tuple(declared)
        self.results: dict[str, Result] = {}
        self.whys = {declaration.id: declaration.why for declaration in declared}
        if unknown := sorted(set(self.whys) - {item.id for item in items}):
            raise InPlaceTTTError(
                f"the declared deviation {unknown[0]!r} is not the id of an item; docs/audit.md lists them."
            )
        if empty := [id for id, why in self.whys.items() if not str(why).strip()]:
            raise InPlaceTTTError(f"the declared deviation {empty[0]!r} has an empty `why`; give a reason.")

    def decide(self, item: Item, probe: Probe, measured: Any) -> None:
        """Runs the item's probe on `measured` and stores the result.

        If the probe cannot decide, the verdict is "not checked", with the reason in one sentence.

        Raises:
            InPlaceTTTError: if the module raises an error; the message names the item.
        """
        if self.progress is not None:
            self.progress(len(self.results), len(self.items), item.title)
        try:
            if self.profile == "ttt_ntp" and item.expected and "ttt_ntp" not in item.expected:
                raise NotChecked("the public recipes of TTT-NTP do not agree on it")
            outcome = probe(measured, item.expected.get(self.profile))
        except NotChecked as reason:
            outcome = Outcome("not checked", str(reason))
        except InPlaceTTTError as error:
            raise InPlaceTTTError(
                f"{self.name} refuses while the audit measures {item.id!r}: {error}"
            ) from error
        except Exception as error:
            if is_the_probes(error):
                # a failure of the probe itself shows nothing about the module
                failure = f"{type(error).__name__}: {one_line(error, kind=False)}; report it"
                outcome = Outcome("not checked", f"the audit's own probe fails with {failure}")
            else:
                raise InPlaceTTTError(
                    f"{self.name} raises {type(error).__name__} while the audit measures {item.id!r}: "
                    f"{one_line(error, kind=False)}; "
                    "make it run on short random sequences."
                ) from error
        if outcome.verdict == "deviates" and (
            names := [id for id in item.named_by if id in self.results and self._deviates(id)]
        ):
            found = f"{outcome.found}, which {' and '.join(f'`{id}`' for id in names)} reports"
            outcome = Outcome("not checked", found, outcome.numbers, outcome.tolerance)
        if self.profile == "reference" and item.absent:
            # to have a feature that the reference code lacks is an extension
            verdict = _OF_ABSENT.get(outcome.verdict, outcome.verdict)
            outcome = dataclasses.replace(outcome, verdict=verdict)
        declared = self.whys.get(item.id) if outcome.verdict == "deviates" else None
        self.results[item.id] = Result(item, outcome, item.expects(self.profile), declared)

    def _deviates(self, id: str) -> bool:
        return self.results[id].outcome.verdict == "deviates"

    def report(self, facts: dict[str, str]) -> Report:
        return Report(
            self.name, self.profile, [self.results[item.id] for item in self.items], self.declared, facts
        )

"""The report of an audit, as data, as Markdown and as an HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InPlaceTTTError
from ..files.json_files import read_json
from ..reports import charts
from ..reports.page import render
from .item import PROFILES, Item, Profile
from .outcome import VERDICTS, Outcome, Verdict

_NAMES: dict[Profile, str] = {"paper": "the paper", "reference": "the reference code", "ttt_ntp": "TTT-NTP"}


@dataclass(frozen=True)
class Declaration:
    """Names a known deviation that its author accepts.

    Args:
        id: the id of the item; docs/audit.md lists them.
        why: the reason.

    Examples:
        >>> from inplace_ttt.audit import Declaration
        >>> declared = [Declaration("chunk-size", "our documents have 3k tokens on average")]
    """

    id: str
    why: str


@dataclass(frozen=True)
class Result:
    """The result of one item on one subject."""

    item: Item
    outcome: Outcome
    expected: str
    declared: str | None = None  # the reason, if the deviation is declared

    @property
    def verdict(self) -> Verdict:
        return self.outcome.verdict

    @property
    def undeclared(self) -> bool:
        return self.verdict == "deviates" and self.declared is None

    @property
    def is_fault(self) -> bool:
        """True for an undeclared deviation that no choice of settings explains."""
        return self.undeclared and not (self.item.choice or self.item.expected)

    @property
    def numbers(self) -> dict[str, str]:
        """The measured values as text."""
        return {name: _text(value) for name, value in self.outcome.numbers.items()}

    @property
    def tolerance(self) -> str:
        tolerance = self.outcome.tolerance
        return "" if tolerance is None else "exact" if tolerance == 0 else _text(float(tolerance))

    def evidence(self) -> dict[str, Any]:
        """Returns the numbers, their tolerance and the data of a chart."""
        found: dict[str, Any] = {"numbers": self.outcome.numbers}
        if self.outcome.tolerance is not None:
            found["tolerance"] = self.outcome.tolerance
        if self.outcome.chart is not None:
            found["chart"] = self.outcome.chart
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.item.id,
            "title": self.item.title,
            "paper_ref": self.item.paper_ref,
            "expected": self.expected,
            "found": self.outcome.found,
            "evidence": self.evidence(),
            "verdict": self.verdict,
            "declared": self.declared,
            "sure": self.item.sure,
            "reference_code": self.item.reference_code,
            "why": self.item.why,
            "remedy": self.item.remedy,
        }


@dataclass(frozen=True)
class Report:
    """Holds the results of an audit, as data, as Markdown and as an HTML page.

    Attributes:
        subject: name of the audited model, module or recipe.
        profile: the method that it was compared with.
        items: one result per item, in the order of the report.
        declarations: the declared deviations.
        facts: properties of the subject, for the head of the report.

    Examples:
        >>> import torch
        >>> from inplace_ttt.audit import AuditedModule, audit_module
        >>> class Frozen(AuditedModule):
        ...     name, input_size, d, h, chunk_size, eta = "a plain linear map", 48, 16, 48, 12, 1.0
        ...     fast_weight, proj = torch.randn(16, 48).double(), torch.eye(16).double()
        ...     conv = torch.ones(16, 1, 1).double()
        ...     def keys(self, x):
        ...         return x
        ...     def forward(self, x, target, *, documents=None, padding=None):
        ...         return x @ self.fast_weight.mT
        >>> report = audit_module(Frozen())
        >>> report["writes"].outcome.found
        'no write is ever read: TTT does nothing'
    """

    subject: str
    profile: Profile
    items: Sequence[Result]
    declarations: Sequence[Declaration] = ()
    facts: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, id: str) -> Result:
        """Returns the result of the item with that id."""
        return next(result for result in self.items if result.item.id == id)

    @property
    def undeclared(self) -> list[str]:
        """Ids of the deviations that are not declared."""
        return [result.item.id for result in self.items if result.undeclared]

    @property
    def faults(self) -> list[str]:
        """Ids of the undeclared deviations that make a model or a run wrong, whatever its settings are."""
        return [result.item.id for result in self.items if result.is_fault]

    @property
    def stale_declarations(self) -> list[Declaration]:
        """Declarations of items that do not deviate.

        An item that was not checked may still deviate, so its declaration is not stale.
        """
        fine = {r.item.id for r in self.items if r.verdict in ("conforms", "unspecified", "extension")}
        return [declaration for declaration in self.declarations if declaration.id in fine]

    def count(self, verdict: Verdict) -> int:
        """Counts the items with a verdict.

        Args:
            verdict: "conforms", "deviates", "extension", "unspecified" or "not checked".

        Returns:
            The number of items.

        Examples:
            >>> report.count("deviates") == len(report.undeclared)
            True
        """
        return sum(result.verdict == verdict for result in self.items)

    def summary(self) -> str:
        """Summarizes the audit in one sentence.

        Returns:
            The number of deviations and their ids.

        Examples:
            >>> report.summary()
            '1 of 62 items deviate from the paper, 1 of them undeclared: writes.'
        """
        total, profile = len(self.items), _NAMES[self.profile]
        deviations = [r.item.id for r in self.items if r.verdict == "deviates"]
        if not deviations:
            return (
                f"No deviation from {profile} was found in {total - self.count('not checked')} checked items."
            )
        declared = "all declared" if not self.undeclared else f"{len(self.undeclared)} of them undeclared"
        return (
            f"{len(deviations)} of {total} items deviate from {profile}, {declared}: {', '.join(deviations)}."
        )

    def differences(self, other: Report) -> list[tuple[Result, Result]]:
        """Compares two reports item by item.

        Args:
            other: another report.

        Returns:
            The pairs of results with different verdicts or findings.

        Examples:
            >>> report.differences(report)
            []
        """
        theirs = {result.item.id: result for result in other.items}
        pairs = [(result, theirs[result.item.id]) for result in self.items if result.item.id in theirs]
        return [(x, y) for x, y in pairs if (x.verdict, _said(x)) != (y.verdict, _said(y))]

    def compared(self, other: Report) -> dict[str, Any]:
        """Converts `differences` to JSON values.

        Args:
            other: another report.

        Returns:
            A dict with the other report's subject and undeclared deviations, and with the verdicts and
            findings of both reports for each item that differs.

        Examples:
            >>> report.compared(report)["differences"]
            []
        """
        rows = [
            {"id": x.item.id, "title": x.item.title, "a": {"verdict": x.verdict, "found": x.outcome.found},
             "b": {"verdict": y.verdict, "found": y.outcome.found}}
            for x, y in self.differences(other)
        ]  # fmt: skip
        return {"subject": other.subject, "undeclared": other.undeclared, "differences": rows}

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to JSON values.

        Returns:
            The values that `inplace-ttt audit --format json` prints.

        Examples:
            >>> sorted(report.to_dict())
            ['counts', 'facts', 'items', 'profile', 'stale_declarations', 'subject', 'undeclared']
        """
        return {
            "subject": self.subject,
            "profile": self.profile,
            "facts": self.facts,
            "items": [result.to_dict() for result in self.items],
            "undeclared": self.undeclared,
            "stale_declarations": [{"id": d.id, "why": d.why} for d in self.stale_declarations],
            "counts": {verdict: self.count(verdict) for verdict in VERDICTS},
        }

    def to_markdown(self, other: Report | None = None) -> str:
        """Renders the report in Markdown.

        Args:
            other: another report to compare with, or None.

        Returns:
            The text.

        Examples:
            >>> report.to_markdown().splitlines()[0]
            '# In-Place TTT audit: a plain linear map'
        """
        return self._render("audit.md.j2", other)

    def to_html(self, other: Report | None = None) -> str:
        """Renders the report as one self-contained HTML page, with charts if matplotlib is installed.

        Args:
            other: another report to compare with, or None.

        Returns:
            The page, which loads no other files.

        Examples:
            >>> report.to_html().startswith("<!DOCTYPE html>")
            True
        """
        return self._render("audit.html.j2", other, draw=charts.svg if charts.available() else None)

    def _render(self, template: str, other: Report | None, **values: Any) -> str:
        deviations = [r for r in self.items if r.verdict == "deviates"]
        return render(
            template,
            title=f"{_TITLE}{self.subject}",
            good=not self.undeclared,
            report=self,
            other=other,
            facts={"held against": PROFILES[self.profile], **self.facts},
            deviations={
                "Undeclared deviations": [r for r in deviations if r.undeclared],
                "Declared deviations": [r for r in deviations if not r.undeclared],
            },
            verdicts=VERDICTS,
            **values,
        )


def _said(result: Result) -> str:
    """Returns the finding, or "" for a number that changes by rounding alone."""
    return "" if result.item.id == "state-precision" else result.outcome.found


_TITLE = "In-Place TTT audit: "
_HEAD = 1 << 15
"""Number of bytes at the start of a report that include its title. A page has its style before the title."""


def is_report(file: str | os.PathLike[str]) -> bool:
    """Returns True if the file is an audit report in any form. A new report may replace such a file."""
    try:
        values = read_json(Path(file), "not a report")
    except InPlaceTTTError:
        try:
            with open(file, "rb") as held:
                head = held.read(_HEAD).decode("utf-8", "replace")
        except OSError:
            return False
        return head.startswith((f"# {_TITLE}", "<!DOCTYPE html>")) and _TITLE in head
    return {"subject", "profile", "items", "undeclared", "stale_declarations", "counts"} <= values.keys()


def for_card(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the summary of an audit for a model card, from `Report.to_dict`."""
    declared = [item["id"] for item in report["items"] if item["declared"] is not None]
    return {"profile": report["profile"], "undeclared": list(report["undeclared"]), "declared": declared}


def _text(value: Any) -> str:
    """Returns a measured value as text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{key} {_text(v)}" for key, v in value.items())
    return str(value)

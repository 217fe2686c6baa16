"""What an audit found, as data, as Markdown and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .catalogue import Item, Profile
from .findings import VERDICTS, Finding, Verdict


@dataclass(frozen=True)
class Declaration:
    """A deviation that somebody stands by: the item's id, and why."""

    id: str
    why: str


@dataclass(frozen=True)
class Result:
    """One item on one subject."""

    item: Item
    finding: Finding
    expected: str
    declared: str | None = None  # why, where the deviation is declared

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict

    @property
    def undeclared(self) -> bool:
        return self.verdict == "deviates" and self.declared is None

    def evidence(self) -> dict[str, Any]:
        """The numbers, how far off they may be, and the data of a chart."""
        found: dict[str, Any] = {"numbers": self.finding.numbers}
        if self.finding.tolerance is not None:
            found["tolerance"] = self.finding.tolerance
        if self.finding.chart is not None:
            found["chart"] = self.finding.chart
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.item.id,
            "title": self.item.title,
            "paper_ref": self.item.paper_ref,
            "expected": self.expected,
            "found": self.finding.found,
            "evidence": self.evidence(),
            "verdict": self.verdict,
            "declared": self.declared,
            "sure": self.item.sure,
            "public_code": self.item.public_code,
            "why": self.item.why,
            "remedy": self.item.remedy,
        }


@dataclass(frozen=True)
class Report:
    """All items of an audit. facts: what was audited, for the head of the report."""

    subject: str
    profile: Profile
    items: Sequence[Result]
    declarations: Sequence[Declaration] = ()
    facts: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, id: str) -> Result:
        """The result of an item by its id."""
        return next(result for result in self.items if result.item.id == id)

    @property
    def undeclared(self) -> list[str]:
        """Ids of the deviations that nobody declared."""
        return [result.item.id for result in self.items if result.undeclared]

    @property
    def stale_declarations(self) -> list[Declaration]:
        """Declarations of what does not deviate (any more). What was not checked may still deviate, so it is not stale."""
        fine = {r.item.id for r in self.items if r.verdict in ("conforms", "unspecified", "extension")}
        return [declaration for declaration in self.declarations if declaration.id in fine]

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict == verdict for result in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "subject": self.subject,
            "profile": self.profile,
            "facts": self.facts,
            "items": [result.to_dict() for result in self.items],
            "undeclared": self.undeclared,
            "stale_declarations": [{"id": d.id, "why": d.why} for d in self.stale_declarations],
            "counts": {verdict: self.count(verdict) for verdict in VERDICTS},
        }

    def to_markdown(self) -> str:
        """A report to read on its own."""
        from .report_text import markdown

        return markdown(self)

    def to_html(self) -> str:
        """One self-contained page, with charts where matplotlib is installed."""
        from .report_page import page

        return page(self)


def summary(report: Report) -> str:
    """One sentence on the whole."""
    total, profile = len(report.items), "the paper" if report.profile == "paper" else "the public code"
    deviations = [r for r in report.items if r.verdict == "deviates"]
    if not deviations:
        return f"No deviation from {profile} was found in {total - report.count('not checked')} checked items."
    undeclared = len(report.undeclared)
    names = ", ".join(r.item.id for r in deviations)
    declared = "all declared" if not undeclared else f"{undeclared} of them undeclared"
    return f"{len(deviations)} of {total} items deviate from {profile}, {declared}: {names}."


def number(value: Any) -> str:
    """A measured value as text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(number, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{key} {number(v)}" for key, v in value.items())
    return str(value)

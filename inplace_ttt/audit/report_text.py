"""A report as Markdown."""

from __future__ import annotations

from .findings import VERDICTS, Verdict
from .report import Report, Result, number, summary

INTRO = (
    "In-Place TTT lets a language model change the down-projection of some MLPs while it reads: text is cut into chunks, and each "
    "chunk's outer product of targets and keys is added to the weight that later chunks are read with. This report holds an "
    "implementation of it against the paper (arXiv 2604.06169), item by item. Each verdict comes from running the model on "
    "chosen inputs and measuring; settings are read only where behaviour cannot show."
)
PROFILES = {
    "paper": "what the paper says",
    "official": "what the authors' public code does",
}


def markdown(report: Report) -> str:
    """Head, deviations in full, then one table, then the numbers of each item."""
    parts = [f"# In-Place TTT audit: {report.subject}", f"**{summary(report)}**", INTRO, _facts(report), _legend(report)]
    deviations = [r for r in report.items if r.verdict == "deviates"]
    for title, results in (
        ("Undeclared deviations", [r for r in deviations if r.undeclared]),
        ("Declared deviations", [r for r in deviations if not r.undeclared]),
    ):
        if results:
            parts.append("\n\n".join([f"## {title}", *map(_in_full, results)]))
    if report.stale_declarations:
        lines = [
            f"- `{d.id}` ({d.why}): it is declared, and does not deviate. Take the declaration out." for d in report.stale_declarations
        ]
        parts.append("\n".join(["## Declarations that no longer apply", "", *lines]))
    parts.append(_table(report))
    parts.append(_numbers(report))
    return "\n\n".join(parts) + "\n"


def _facts(report: Report) -> str:
    rows = [("held against", PROFILES[report.profile]), *report.facts.items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)])


def _legend(report: Report) -> str:
    verdicts: list[Verdict] = list(VERDICTS)
    rows = [f"| {verdict} | {report.count(verdict)} | {VERDICTS[verdict]} |" for verdict in verdicts]
    return "\n".join(["| verdict | items | means |", "|---|---|---|", *rows])


def _in_full(result: Result) -> str:
    item = result.item
    lines = [
        f"### {item.title} (`{item.id}`)",
        "",
        f"- **Found:** {result.finding.found}",
        f"- **Expected:** {result.expected} ({item.paper_ref}; confidence in this reading: {item.sure})",
        f"- **The public code:** {item.public_code}",
        f"- **Why it matters:** {item.why}",
    ]
    lines.append(f"- **Declared:** {result.declared}" if result.declared else f"- **What to do:** {item.remedy}")
    return "\n".join(lines)


def _table(report: Report) -> str:
    lines = ["## All items", "", "| item | verdict | found | expected | where |", "|---|---|---|---|---|"]
    for result in report.items:
        item = result.item
        verdict = f"**{result.verdict}**" if result.verdict == "deviates" else result.verdict
        verdict += " (declared)" if result.declared else ""
        cells = (f"{item.title} (`{item.id}`)", verdict, result.finding.found, result.expected, item.paper_ref)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _numbers(report: Report) -> str:
    lines = ["## Numbers", "", "| item | measured | tolerance |", "|---|---|---|"]
    for result in report.items:
        numbers = "; ".join(f"{name}: {number(value)}" for name, value in result.finding.numbers.items())
        if numbers:
            lines.append(f"| `{result.item.id}` | {_cell(numbers)} | {_tolerance(result)} |")
    return "\n".join(lines)


def _tolerance(result: Result) -> str:
    tolerance = result.finding.tolerance
    return "" if tolerance is None else "exact" if tolerance == 0 else number(float(tolerance))


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")

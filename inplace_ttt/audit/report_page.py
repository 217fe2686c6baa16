"""A report as one self-contained page: a table that sorts and filters, numbers and charts behind each row."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from . import charts
from .findings import VERDICTS, Verdict
from .page_assets import SCRIPT, STYLE
from .report import Report, Result, number, summary
from .report_text import INTRO, PROFILES

_ORDER: tuple[Verdict, ...] = ("deviates", "extension", "unspecified", "not checked", "conforms")


def page(report: Report) -> str:
    """The whole page as HTML."""
    good = not report.undeclared
    deviations = [r for r in report.items if r.verdict == "deviates"]
    draws = charts.available()
    sections = [
        f"<h1>In-Place TTT audit: {escape(report.subject)}</h1>",
        f'<p class="summary {"good" if good else "bad"}">{escape(summary(report))}</p>',
        f'<p class="intro">{escape(INTRO)}</p>',
        _facts(report),
        _cards("Undeclared deviations", [r for r in deviations if r.undeclared]),
        _cards("Declared deviations", [r for r in deviations if not r.undeclared]),
        _stale(report),
        "<h2>All items</h2>",
        '<p class="note">A row opens to the numbers behind it. Errors are relative to the size of one write unless they say otherwise.'
        f"{'' if draws else ' Charts are left out, since matplotlib is not installed (pip install inplace-ttt[plots]).'}</p>",
        _controls(report),
        '<table class="items"><colgroup><col style="width:31%"><col style="width:12%"><col style="width:36%"><col style="width:21%">'
        "</colgroup>",
        '<thead><tr><th tabindex="0">Item</th><th tabindex="0">Verdict</th><th tabindex="0">Found</th>'
        '<th tabindex="0">In the paper</th></tr></thead>',
        *(_item(result, draws) for result in report.items),
        "</table>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>In-Place TTT audit: {escape(report.subject)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _facts(report: Report) -> str:
    rows = [("held against", PROFILES[report.profile]), *report.facts.items()]
    return '<dl class="facts">' + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows) + "</dl>"


def _cards(title: str, results: list[Result]) -> str:
    if not results:
        return ""
    cards = []
    for result in results:
        last = ("Declared", result.declared) if result.declared else ("What to do", result.item.remedy)
        rows = [("Found", result.finding.found), ("Expected", _expected(result))]
        if result.expected != result.item.public_code:
            rows.append(("The public code", result.item.public_code))
        rows += [("Why it matters", result.item.why), last]
        kind = "card declared" if result.declared else "card"
        cards.append(
            f'<section class="{kind}"><h3>{escape(result.item.title)} <code>{result.item.id}</code></h3>{_definitions(rows)}</section>'
        )
    return f"<h2>{title}</h2>" + "\n".join(cards)


def _stale(report: Report) -> str:
    if not report.stale_declarations:
        return ""
    rows = "".join(f"<li><code>{escape(d.id)}</code> {escape(d.why)}</li>" for d in report.stale_declarations)
    return f"<h2>Declarations that no longer apply</h2><p>These are declared and do not deviate; take them out.</p><ul>{rows}</ul>"


def _controls(report: Report) -> str:
    buttons = [
        f'<button data-verdict="{verdict}" aria-pressed="false" title="{escape(VERDICTS[verdict])}">'
        f"{verdict} <b>{report.count(verdict)}</b></button>"
        for verdict in _ORDER
    ]
    return (
        '<div class="controls"><input id="search" type="search" placeholder="Filter items" aria-label="Filter items">'
        + "".join(buttons)
        + '<button id="all" aria-pressed="false">open all</button><span class="note" id="shown"></span></div>'
    )


def _item(result: Result, draws: bool) -> str:
    item, finding = result.item, result.finding
    verdict = escape(result.verdict) + (" (declared)" if result.declared else "")
    details = [
        ("Expected", _expected(result)),
        ("Public code", item.public_code),
        ("Why it matters", item.why),
        ("If it deviates", item.remedy),
    ]
    if result.declared:
        details.append(("Declared", result.declared))
    numbers = "".join(f"<tr><td>{escape(name)}</td><td>{escape(number(value))}</td></tr>" for name, value in finding.numbers.items())
    if finding.tolerance is not None:
        numbers += f"<tr><td>tolerance</td><td>{'exact' if finding.tolerance == 0 else number(float(finding.tolerance))}</td></tr>"
    figure = f"<figure>{charts.svg(finding.chart)}</figure>" if draws and finding.chart is not None else ""
    table = f'<table class="numbers">{numbers}</table>' if numbers else ""
    key = _ORDER.index(result.verdict)
    return (
        f'<tbody class="item" data-verdict="{result.verdict}" id="{item.id}"><tr class="main" tabindex="0" aria-expanded="false">'
        f"<td>{escape(item.title)}<br><code>{item.id}</code></td>"
        f'<td data-key="{key}"><span class="v {result.verdict.replace(" ", "-")}">{verdict}</span></td>'
        f'<td>{escape(finding.found)}</td><td class="ref">{escape(item.paper_ref)}</td></tr>'
        f'<tr class="detail"><td colspan="4"><div class="cols"><div class="text">{_definitions(details)}{table}</div>{figure}</div>'
        "</td></tr></tbody>"
    )


def _expected(result: Result) -> str:
    sure = {"high": "read in the text", "medium": "our reading of an ambiguous passage", "low": "inferred"}[result.item.sure]
    return f"{result.expected} [{sure}]"


def _definitions(rows: Sequence[tuple[str, str | None]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value or '')}</dd>" for name, value in rows) + "</dl>"

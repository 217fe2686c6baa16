"""Two reports side by side."""

from __future__ import annotations

from html import escape
from typing import Any

from .report import Report, Result


def differences(a: Report, b: Report) -> list[tuple[Result, Result]]:
    """The items in which two reports say different things."""
    theirs = {result.item.id: result for result in b.items}
    pairs = [(result, theirs[result.item.id]) for result in a.items if result.item.id in theirs]
    return [(x, y) for x, y in pairs if (x.verdict, _plain(x)) != (y.verdict, _plain(y))]


def _plain(result: Result) -> str:
    """What was found, unless it is a number that rounding alone changes."""
    return "" if result.item.id == "state-precision" else result.finding.found


def comparison(a: Report, b: Report) -> dict[str, Any]:
    """The differences as plain values."""
    rows = [
        {"id": x.item.id, "title": x.item.title, "a": {"verdict": x.verdict, "found": x.finding.found},
         "b": {"verdict": y.verdict, "found": y.finding.found}}
        for x, y in differences(a, b)
    ]  # fmt: skip
    return {"subject": b.subject, "undeclared": b.undeclared, "differences": rows}


def as_markdown(a: Report, b: Report) -> str:
    """A section for the Markdown report."""
    lines = [f"## Compared with {b.subject}", ""]
    rows = differences(a, b)
    if not rows:
        return "\n".join([*lines, "Nothing differs."])
    lines += [f"| item | {a.subject} | {b.subject} |", "|---|---|---|"]
    lines += [f"| `{x.item.id}` | {x.verdict}: {x.finding.found} | {y.verdict}: {y.finding.found} |" for x, y in rows]
    return "\n".join(lines)


def as_html(a: Report, b: Report) -> str:
    """A section for the page."""
    rows = differences(a, b)
    head = f"<h2>Compared with {escape(b.subject)}</h2>"
    if not rows:
        return head + "<p>Nothing differs.</p>"
    cells = "".join(
        f"<tr><td>{escape(x.item.title)}<br><code>{x.item.id}</code></td>"
        + "".join(f'<td><span class="v {r.verdict.replace(" ", "-")}">{r.verdict}</span><br>{escape(r.finding.found)}</td>' for r in (x, y))
        + "</tr>"
        for x, y in rows
    )
    names = "".join(f"<td><b>{escape(name)}</b></td>" for name in ("Item", a.subject, b.subject))
    return f'{head}<table class="numbers"><tr>{names}</tr>{cells}</table>'

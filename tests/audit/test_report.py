"""The three forms of a report."""

import dataclasses
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from models import converted

from inplace_ttt import UpdateClip
from inplace_ttt.audit import Declaration, Outcome, Report, audit_model
from inplace_ttt.training.audit import write_report


@pytest.fixture(scope="module")
def report() -> Report:
    declared = [Declaration("layer-spacing", "three layers | a test"), Declaration("sign", "long mended")]
    return audit_model(converted("llama", clip=UpdateClip(1e-5)), declared=declared)


def test_json_holds_the_contract(report: Report) -> None:
    values = json.loads(json.dumps(report.to_dict()))
    assert values["profile"] == "paper" and values["undeclared"] == ["chunk-size", "clip-effect"]
    assert values["stale_declarations"] == [{"id": "sign", "why": "long mended"}]
    for item in values["items"]:
        assert {"id", "title", "paper_ref", "expected", "found", "evidence", "verdict"} <= set(item)
        assert item["verdict"] in ("conforms", "deviates", "extension", "unspecified", "not checked")
        if item["verdict"] in ("conforms", "deviates") and item["id"] != "extensions":
            assert item["evidence"]["numbers"], item["id"]


def test_markdown_reads_on_its_own(report: Report) -> None:
    text = report.to_markdown()
    assert text.startswith("# In-Place TTT audit: ")
    assert (
        "## Undeclared deviations" in text
        and "## Declared deviations" in text
        and "## Declarations that no longer apply" in text
    )
    widths = {
        len(re.findall(r"(?<!\\)\|", line))
        for line in text.partition("## All items")[2].partition("##")[0].splitlines()
        if line
    }
    assert widths == {6}
    for result in report.items:
        assert f"`{result.item.id}`" in text
    assert "three layers" in text


class Balanced(HTMLParser):
    """Whether tags close in order, and what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            value or ""
            for name, value in attrs
            if name in ("src", "href") and not (value or "").startswith("#")
        ]
        if tag not in ("meta", "col", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_stands_alone(report: Report) -> None:
    page = report.to_html()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and parser.loads == []
    assert page.count('<tbody class="item"') == len(report.items)
    assert page.count("<svg ") == sum(result.outcome.chart is not None for result in report.items) >= 4
    ids = re.findall(r' id="([^"]+)"', page)
    assert {result.item.id for result in report.items} <= set(ids)
    assert len(ids) == len(set(ids)), "two charts share an id"


def test_numbers_that_are_not_finite(report: Report, tmp_path: Path) -> None:
    """Are null in the JSON, which stays one; and a `|` is no new column of a comparison."""
    found = dataclasses.replace(report["sign"], outcome=Outcome("deviates", "a | b", {"value": float("nan")}))
    other = dataclasses.replace(report, items=[found if r is report["sign"] else r for r in report.items])
    write_report(other, tmp_path)
    values = json.loads((tmp_path / "audit.json").read_text(), parse_constant=pytest.fail)
    assert next(item for item in values["items"] if item["id"] == "sign")["evidence"]["numbers"] == {
        "value": None
    }
    assert "| `sign` | conforms: outputs move towards the target | deviates: a \\| b |" in report.to_markdown(
        other
    )


def test_without_matplotlib_the_page_says_so(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = report.to_html()
    assert "matplotlib is not installed" in page and "<svg " not in page

"""The page on diagnosis lists every finding as the code has it; some rule names each."""

import re
from pathlib import Path

from inplace_ttt.diagnostics.catalog import CATALOG

ROOT = Path(__file__).parents[2]


def test_the_page_lists_every_finding_with_its_remedy() -> None:
    page = (
        (ROOT / "docs" / "diagnostics.md")
        .read_text(encoding="utf-8")
        .partition("## Findings")[2]
        .partition("\n## ")[0]
    )
    rows = {
        cells[0]: cells[1:]
        for line in re.findall(r"^\| `(.+) \|$", page, flags=re.MULTILINE)
        if (cells := line.split(" | "))
    }
    assert [name.rstrip("`") for name in rows] == list(CATALOG)
    for name, (severity, what, measured, remedy) in rows.items():
        kind = CATALOG[name.rstrip("`")]
        said = (f"{kind.title}. {kind.meaning}", kind.measured, f"{kind.remedy} {kind.effect}")
        assert (what, measured, remedy) == said, name
        assert severity.split()[0] in ("severe", "warning", "info"), name


def test_diagnosis_needs_no_training_code() -> None:
    for file in (ROOT / "inplace_ttt" / "diagnostics").glob("*.py"):
        assert not re.search(r"import.*Trainer|from \.\.training", file.read_text(encoding="utf-8")), file


def test_some_rule_names_each_finding() -> None:
    source = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "inplace_ttt" / "diagnostics").glob("*.py")
    )
    for name in CATALOG:
        assert source.count(f'"{name}"') >= 2, f"{name} is in the catalog alone"

"""docs/troubleshooting.md quotes messages that the package still prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
LEAST, MOST = 25, 35
"""Messages on the page."""


def literals() -> list[str]:
    """Every string of the package, with … in place of what an f-string fills in."""
    found = []
    for file in (ROOT / "inplace_ttt").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                    )
                )
    return found


def test_every_quoted_beginning_is_one_of_a_message() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert LEAST <= len(quoted) <= MOST and len(set(quoted)) == len(quoted)
    messages = literals()
    assert [text for text in quoted if not any(message.startswith(text) for message in messages)] == []

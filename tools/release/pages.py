"""Tables of the generated reference pages, and the command that writes or checks a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. A pipe inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(
        f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines
    )


def main(
    description: str, page: Path, make: Callable[[], str], arguments: Sequence[str] | None = None
) -> int:
    """Writes a page, or with --check compares it.

    Args:
        description: of the command.
        page: the file.
        make: returns its text.
        arguments: of the command (default: `sys.argv`).

    Returns:
        Exit code: 1 if `--check` is given and the page is not current, else 0.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the page is not current"
    )
    check, text = parser.parse_args(arguments).check, make()
    if not check:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.exists() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page} is not current; run this command without --check.")
    return 1

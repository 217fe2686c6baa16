"""The page's record of a session: questions, answers and files, in a JSON file and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from ...errors import InPlaceTTTError
from ...files.folders import new_file
from ...files.json_files import read_json, write_json
from ...files.schema import from_values

FORMAT = "inplace-ttt-transcript/1"
_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table").disable("image")
"""Answers are Markdown. Their HTML stays text, and their images are not fetched."""


@dataclass
class Entry:
    """A question with its answers, or a note.

    Attributes:
        text: the question or the note.
        answer: with the fast weights; None for a note.
        without: the answer without them; None if it was not asked for.
    """

    text: str
    answer: str | None = None
    without: str | None = None


@dataclass(frozen=True)
class _File:
    """The contents of a transcript's file."""

    format: str
    entries: list[Entry] = field(default_factory=list)


def load(file: Path) -> list[Entry]:
    """Returns the entries in a file; none if it does not exist.

    Raises:
        InPlaceTTTError: if it is damaged.
    """
    if not file.exists():
        return []
    problem = f"cannot read the transcript {file}"
    held = from_values(_File, read_json(file, problem), str(file))
    if held.format != FORMAT:
        raise InPlaceTTTError(f"{problem}: it is not of the format {FORMAT}; move it away.")
    return held.entries


def save(file: Path, entries: Sequence[Entry]) -> None:
    """Writes the entries in one step.

    Raises:
        InPlaceTTTError: if the disk refuses, or the file is not a transcript.
    """
    with new_file(file, ours=_is_transcript(file)) as partial:
        held = [asdict(entry) | {"without": entry.without or None} for entry in entries]
        write_json(partial, {"format": FORMAT, "entries": held})


def _is_transcript(file: Path) -> bool:
    try:
        return read_json(file, "").get("format") == FORMAT
    except InPlaceTTTError:
        return False


def html(entries: Sequence[Entry], *, unseen_tokens: int = 0) -> str:
    """Returns a transcript as HTML.

    Args:
        entries: in their order.
        unseen_tokens: tokens of a session without entries, which was made elsewhere.
    """
    shown = "".join(_turn(entry) if entry.answer is not None else _note(entry.text) for entry in entries)
    if not shown:
        shown = _note(
            f"this session holds {unseen_tokens:,} tokens that were read outside of this page"
            if unseen_tokens
            else "drop a text file to write it into the fast weights, or ask a question"
        )
    # the outer box is a reversed column, which stays scrolled to its end
    return f'<div class="transcript"><div>{shown}</div></div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _turn(entry: Entry) -> str:
    cells = [("with", "With the fast weights", entry.answer)]
    if entry.without is not None:
        cells.append(("without", "Without them", entry.without))
    answers = "".join(
        f'<article class="{name}"><h4>{title}</h4><div class="answer">{_MARKDOWN.render(text or "…")}</div>'
        "</article>"
        for name, title, text in cells
    )
    return (
        f'<section class="turn"><p class="question">{escape(entry.text)}</p>'
        f'<div class="answers">{answers}</div></section>'
    )

"""A folder in which `inplace-ttt evaluate --tasks` runs: a tiny model and its base, a book and questions."""

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    tiny.save_converted(tiny.save_base(folder / "base"), folder / "ttt")
    (folder / "book.txt").write_text(tiny.text(8000), encoding="utf-8")
    tiny.write_lines(folder / "questions.jsonl", tiny.questions(40))
    return folder

"""JSON lines as sources: other fields, other columns in one folder, compressed files."""

from pathlib import Path
from typing import Any

import pytest

from .corpus import LENGTHS, documents, jsonl, texts, tokens


def wide(number: int) -> dict[str, Any]:
    """A record in which other fields change their types, or are not there."""
    others: list[dict[str, Any]] = [
        {},
        {"id": number},
        {"id": f"x{number}"},
        {"meta": {"a": [1, "b", None]}},
        {"meta": "none", "id": None},
    ]
    return {"text": texts()[number], **others[number % len(others)]}


ODD = {
    "a column that begins late": [{"text": texts()[0]}, {"text": texts()[1], "id": 3}],
    "a column that is null at first": [
        {"text": texts()[0], "id": None},
        {"text": texts()[1], "id": {"a": 1}},
    ],
    "columns of other types": [wide(number) for number in range(len(LENGTHS))],
    "a text that is null at first": [{"text": None, "id": 1}, {"id": "x"}, {"text": texts()[0]}],
    "a text that comes late": [{"id": 1}, {"text": texts()[0]}],
    "lines that are empty": None,
    "a mark at the beginning": None,
}
BLOCK = 11 << 20
"""Bytes after which `datasets` begins another table of its own types."""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_of_json_lines_one_field_is_read(build: Any, tmp_path: Path, name: str, streaming: bool) -> None:
    """What stands in the others does not matter."""
    records = ODD[name] or [{"text": texts()[0]}, {"text": texts()[1]}]
    records[0]["pad"] = "x" * BLOCK
    file = jsonl(tmp_path / "a.jsonl", records)
    if name == "lines that are empty":
        file.write_text("\n" + file.read_text().replace("\n", "\n\n  \n"))
    elif name == "a mark at the beginning":
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    wanted = [tokens(record["text"]) for record in records if record.get("text")]
    assert documents(build(file, streaming=streaming).train) == wanted


@pytest.mark.parametrize("streaming", [False, True])
def test_files_with_other_columns_stand_in_one_folder(build: Any, tmp_path: Path, streaming: bool) -> None:
    for number in range(5):
        jsonl(tmp_path / "folder" / f"{number}.jsonl", [wide(number)])
    assert documents(build(tmp_path / "folder", streaming=streaming).train) == [
        tokens(texts()[number]) for number in range(5)
    ]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", ["zst", "bz2", "xz"])
def test_compressed_lines_are_read(build: Any, tmp_path: Path, ending: str, streaming: bool) -> None:
    import bz2
    import lzma

    import zstandard

    packed = {"zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress}[ending]
    (tmp_path / f"a.jsonl.{ending}").write_bytes(
        packed(jsonl(tmp_path / "plain" / "a.jsonl", [wide(0), wide(1)]).read_bytes())
    )
    assert documents(build(tmp_path / f"a.jsonl.{ending}", streaming=streaming).train) == [
        tokens(texts()[0]),
        tokens(texts()[1]),
    ]

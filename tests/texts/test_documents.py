"""Documents of every format, found by name; and what is refused."""

import bz2
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from datasets import Dataset
from tiny import byte_level, save_llama

from inplace_ttt import cli
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.texts.documents import documents_in, joined_tokens, tokens_of

TEXTS = ["The keeper's name is Ottoline.", "A second\ntext, with two lines.", "Ende gut, alles gut. é"]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def write(path: Path, kind: str) -> Path:
    """The texts in one format, as a file or folder."""
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (path / f"{number}.txt").write_text(text, encoding="utf-8")
        (path / "manifest.json").write_text('{"files": 3}')
        return path
    if kind == "txt.gz":
        for number, text in enumerate(TEXTS):
            (path / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
        return path
    if kind == "saved":
        Dataset.from_list(RECORDS).save_to_disk(path / "saved")
        return path / "saved"
    file = path / f"a.{kind}"
    if kind == "parquet":
        Dataset.from_list(RECORDS).to_parquet(file)
    else:
        pack = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.compress}.get(
            kind.split(".")[-1], bytes
        )
        file.write_bytes(pack((json.dumps(RECORDS) if kind == "json" else LINES).encode()))
    return file


KINDS = ("txt", "txt.gz", "jsonl", "ndjson", "jsonl.gz", "jsonl.bz2", "jsonl.zst", "json", "parquet", "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_documents(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = documents_in([write(tmp_path, kind)])
    assert [document.text() for document in found] == TEXTS
    tokenizer = byte_level()
    for document, text in zip(found, TEXTS, strict=True):
        assert tokens_of(document, tokenizer, 1000)[0].tolist() == tokenizer(text).input_ids
        assert tokens_of(document, tokenizer, 5)[0].tolist() == tokenizer(text).input_ids[:5]
    assert len(joined_tokens(found, tokenizer, 40)[0]) == 40
    assert (kind == "txt") != ("read 3 documents of" in caplog.text and "'text'" in caplog.text)


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"body": "one", "text": "no"}\n\n{"body": ""}\n{"body": null}\n{"body": "two"}\n'
    )
    found = documents_in([tmp_path / "a.jsonl"], text_field="body")
    assert [document.text() for document in found] == ["one", "two"]
    assert {document.source for document in found} == {str(tmp_path / "a.jsonl")}
    assert found[0].name == f"{tmp_path}/a.jsonl:1"


CHATS = [
    [{"role": "user", "content": "Who keeps the light?"}, {"role": "assistant", "content": "Ottoline."}],
    [{"role": "user", "content": "Thanks."}],
]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_chat_is_the_text_that_the_chat_template_makes_of_it(kind: str, tmp_path: Path) -> None:
    records = [{"messages": chat} for chat in CHATS]
    file = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        Dataset.from_list(records).to_parquet(file)
    found = documents_in([file])
    tokenizer = byte_level()
    with pytest.raises(InPlaceTTTError, match="lacks a chat template"):
        tokens_of(found[0], tokenizer, 100)
    with pytest.raises(InPlaceTTTError, match="is a chat; give prose"):
        found[0].text()
    tokenizer.chat_template = TEMPLATE
    wanted = ["<user>Who keeps the light?<assistant>Ottoline.", "<user>Thanks."]
    assert [tokenizer.decode(tokens_of(document, tokenizer, 100)[0]) for document in found] == wanted


BAD = {
    "no text field": (
        "a.jsonl",
        b'{"body": "x"}\n',
        "lack the field 'text' (they have 'body'); set --text-field",
    ),
    "nested": ("a.jsonl", b'{"text": {"en": "x"}}\n', "the field 'text' of"),
    "nested list": ("a.json", b'[{"text": ["x"]}]', "holds list, not text; set --text-field"),
    "half a line": ("a.jsonl", b'{"text": "x"}\n{"text": "y', "record 2 is not JSON"),
    "numbers": ("a.jsonl", b'{"text": 5}\n', "holds int, not text"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(LINES.encode() * 50)[:40], "cannot be read"),
    "not a gzip": ("a.jsonl.gz", LINES.encode(), "cannot be read"),
    "not a parquet": ("a.parquet", b"hello", "cannot be read"),
    "tokens": ("a.jsonl", b'{"input_ids": [1, 2]}\n', "holds token ids"),
    "empty lines": ("a.jsonl", b"\n\n", "no record"),
    "nothing": ("a.jsonl", b"", "no record"),
    "no words": (
        "a.jsonl",
        b'{"text": " "}\n{"text": null}\n',
        "lacks records with text in its field 'text'",
    ),
    "lines in a txt": ("a.txt", LINES.encode(), "holds JSON lines, not text; give it the ending .jsonl"),
    "table": ("a.csv", b"text\nx\n", "is not that of a known format"),
    "chat without content": ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "give each a text 'role'"),
    "chat of pictures": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": [1]}]}\n',
        "give each a text 'role'",
    ),
    "chat in one word": ("a.jsonl", b'{"messages": "hello"}\n', "not a list of messages"),
    "another encoding": ("a.jsonl", '{"text": "é"}\n'.encode("latin-1"), "is not UTF-8 text"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_text_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    file, content, expected = BAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InPlaceTTTError) as refused:
        documents_in([tmp_path / file])
    message = str(refused.value)
    assert expected in message and file in message and message.endswith(".") and "\n" not in message


def test_names_that_stand_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    for name, expected in (
        (tmp_path / "pictures", "holds no documents (1 files"),
        (tmp_path / "a.txt", "does not exist"),
        (f"{tmp_path}/*.jsonl", "no file matches the pattern"),
        ("speeches", "the file or folder speeches does not exist"),
        ("/dev/zero", "/dev/zero is a device"),
    ):
        with pytest.raises(InPlaceTTTError, match=r"^--haystack: ") as refused:
            documents_in([name], "--haystack")
        assert expected in str(refused.value)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InPlaceTTTError, match="does nothing with text files"):
        documents_in([tmp_path / "a.txt"], text_field="body")
    (tmp_path / "b.jsonl").write_text(LINES)
    with pytest.raises(
        InPlaceTTTError, match=r"several formats \(1 text, 1 json\); name those of one format"
    ):
        documents_in([tmp_path])


def test_without_datasets_text_files_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text(LINES)
    assert documents_in([tmp_path / "a.txt"])[0].text() == "x"
    with pytest.raises(InPlaceTTTError, match="needs the package datasets, which is not installed"):
        documents_in([tmp_path / "b.jsonl"])


VERBS = {
    "evaluate": "evaluate model --text {}",
    "diagnose": "diagnose model --text {} --out out",
    "convert": "convert model out --preset ridge --calibrate {}",
    "babilong": "evaluate model --tasks babilong_qa1 --lengths 512 --text {}",
    "ruler": "evaluate model --tasks ruler_niah_single_2 --lengths 512 --text {}",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "base"
    save_llama(folder, byte_level(), num_hidden_layers=2)
    return folder


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["no text field", "lines in a txt", "half a gzip"])
def test_every_verb_reads_texts_by_the_same_rules(
    verb: str, name: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[Any], monkeypatch: Any
) -> None:
    file, content, expected = BAD[name]
    (tmp_path / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    words = VERBS[verb].format(file).split()
    assert cli.main([str(base) if word == "model" else word for word in words]) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("inplace-ttt")]
    assert expected in line and not (tmp_path / "out").exists() and out == ""

"""From files to documents: formats, order, tokenizers, and what is refused."""

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerFast

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.data.streams import RowStream
from inplace_ttt.training.recipe.changes import refuse_other_results
from inplace_ttt.training.recipe.data_section import Data

from .corpus import CHUNK, EOS, LENGTH, LENGTHS, PAD, documents, recipe, texts, tokens
from .recipes import tiny_recipe


def write(path: Path, kind: str) -> Path:
    """The documents in another format."""
    records = [{"text": text, "title": f"{i}"} for i, text in enumerate(texts())]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if kind == "jsonl":
        (path / "a.jsonl").write_text(lines)
    elif kind == "json list":
        (path / "a.json").write_text(json.dumps(records))
    elif kind == "jsonl.gz":
        (path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        Dataset.from_list(records[:4]).to_parquet(path / "a.parquet")
        Dataset.from_list(records[4:]).to_parquet(path / "b.parquet")
    elif kind == "saved":
        Dataset.from_list(records).save_to_disk(path / "saved")
    elif kind == "saved splits":
        DatasetDict(
            {"train": Dataset.from_list(records), "test": Dataset.from_list(records[:1])}
        ).save_to_disk(path / "saved")
    elif kind == "arrow":
        Dataset.from_list(records).save_to_disk(path / "saved")
        shutil.move(path / "saved" / "data-00000-of-00001.arrow", path / "a.arrow")
        return path / "a.arrow"
    elif kind == "tokens":
        Dataset.from_list([{"input_ids": tokens(text), "n": 0} for text in texts()]).to_parquet(
            path / "a.parquet"
        )
    return path / "saved" if (path / "saved").exists() else path


KINDS = ("jsonl", "json list", "jsonl.gz", "parquet", "saved", "saved splits", "arrow", "tokens")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(
    build: Any, folder: Path, tmp_path: Path, kind: str, streaming: bool
) -> None:
    (tmp_path / "other").mkdir()
    found = build(write(tmp_path / "other", kind), streaming=streaming)
    assert isinstance(found.train, RowStream if streaming else Dataset)
    assert list(found.train) == list(build(folder).train)
    assert documents(found.train) == [tokens(text) for text in texts()]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_text_field_that_is_given_is_read(build: Any, tmp_path: Path, streaming: bool) -> None:
    """Else tokens are, where a record has both."""
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": texts()[0], "input_ids": tokens(texts()[3])}) + "\n"
    )
    for settings, expected in (({"text_field": "text"}, texts()[0]), ({}, texts()[3])):
        assert documents(build(tmp_path / "a.jsonl", streaming=streaming, **settings).train) == [
            tokens(expected)
        ]


def test_a_run_from_before_text_field_could_be_left_out_goes_on(tmp_path: Path) -> None:
    now = tiny_recipe(tmp_path)
    before = now.to_dict()
    before["data"]["text_field"] = "text"
    refuse_other_results(before, now, "out")
    given = tiny_recipe(tmp_path, "data.text_field=text")
    refuse_other_results(given.to_dict(), given, "out")
    with pytest.raises(InPlaceTTTError, match=r"data\.text_field 'body'"):
        refuse_other_results(tiny_recipe(tmp_path, "data.text_field=body").to_dict(), now, "out")


def test_folders_and_patterns_come_in_the_order_of_their_names(build: Any, folder: Path) -> None:
    by_name = [tokens(texts()["abcdefghij".index(name)]) for name in "abcdfghij"]
    assert documents(build(f"{folder}/*.txt").train) == by_name
    assert sorted(documents(build(folder).train)) == sorted(tokens(text) for text in texts())
    assert documents(build([folder / "c.txt", folder / "b.txt", f"{folder}/[ij].txt"]).train) == [
        tokens(texts()[i]) for i in (2, 1, 8, 9)
    ]


def test_names_with_the_signs_of_patterns_are_names(build: Any, folder: Path) -> None:
    (folder / "[x]*?.txt").write_text(texts()[0])
    assert documents(build(folder / "[x]*?.txt").train) == [tokens(texts()[0])]


def test_a_source_of_the_hub_is_handed_to_datasets(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None = None, **kwargs: Any) -> Dataset:
        asked.append((name, config, kwargs["split"], kwargs["streaming"]))
        return Dataset.from_list([{"text": text} for text in texts()])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = build(["owner/corpus", "corpus:part", "owner/corpus:part@train[:5%]"], split="all")
    assert asked == [
        ("owner/corpus", None, "all", False),
        ("corpus", "part", "all", False),
        ("owner/corpus", "part", "train[:5%]", False),
    ]
    assert found.report.documents == 3 * len(LENGTHS)


def test_a_tokenizers_own_marks_are_kept_and_eos_stands_once(
    build: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A tokenizer that begins its texts with BOS does so here; one that ends them with EOS gets no second
    one; one without gets none."""
    from tokenizers import processors

    (tmp_path / "a.txt").write_text(texts()[0])
    data = Data(train=[str(tmp_path / "a.txt")], sequence_length=LENGTH, cache=str(tmp_path / "cache"))
    body = tokens(texts()[0])[:-1]
    for template, eos, expected in (
        ("<unk> $A", "<eos>", [2, *body, EOS]),
        ("$A <eos>", "<eos>", [*body, EOS]),
        ("$A", None, body),
    ):
        other = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token=eos, pad_token="<pad>"
        )
        other.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<unk>", 2), ("<eos>", EOS)]
        )
        found = build_data(recipe(data), other, CHUNK)
        assert [t for row in found.train for t in row["input_ids"] if t != PAD] == expected


def test_empty_documents_are_left_out(build: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ("", None, " \n", texts()[0], "", texts()[3]))
    )
    for streaming in (False, True):
        found = build(tmp_path / "a.jsonl", streaming=streaming)
        assert documents(found.train) == [tokens(texts()[0]), tokens(texts()[3])]
        assert found.report.documents == 2
    assert build(tmp_path / "a.jsonl").report.empty_documents == 4


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.sample(1)
def test_a_document_of_a_million_tokens(build: Any, tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "long.txt").write_text("w7 " * 1_000_000)
    found = build(tmp_path / "long.txt", sequence_length=65536, chunk_size=4096, streaming=streaming)
    assert found.report.tokens == 1_000_001 and found.report.rows == 16
    assert sum(1 for _ in found.train) == 16


def bad_inputs(path: Path) -> dict[str, tuple[Any, dict[str, Any], str]]:
    """Name -> (train, data settings, what the error says)."""
    (path / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 50)
    (path / "fine.txt").write_text(texts()[0])
    (path / "a.xyz").write_text("w1 w2")
    (path / "empty").mkdir()
    (path / "empty.txt").write_text("")
    (path / "empty.jsonl").write_text("")
    (path / "broken.jsonl").write_text('{"text": "w1"}\n{"text": ')
    (path / "body.jsonl").write_text('{"body": "w1"}\n')
    (path / "numbers.jsonl").write_text('{"text": 3}\n')
    (path / "tokens.jsonl").write_text('{"input_ids": [1, 999999]}\n')
    for name, ids in {
        "null": "[5, null, 7]",
        "number": "5",
        "booleans": "[true, false]",
        "nested": "[[1, 2]]",
    }.items():
        (path / f"{name}.jsonl").write_text(f'{{"input_ids": {ids}}}\n')
    (path / "unlike").mkdir()
    for name, value in (("a", 3), ("b", "x")):
        Dataset.from_list([{"text": "w1", "id": value}]).to_parquet(path / "unlike" / f"{name}.parquet")
    (path / "notparquet.parquet").write_text("hello")
    (path / "mixed").mkdir()
    (path / "mixed" / "a.txt").write_text("w1")
    (path / "mixed" / "b.jsonl").write_text('{"text": "w1"}')
    return {
        "latin": (path / "latin.txt", {}, r"latin\.txt is not UTF-8 text"),
        "latin among others": (f"{path}/[fl]*.txt", {}, r"/latin\.txt is not UTF-8 text"),
        "ending": (path / "a.xyz", {}, r"ending of .*a\.xyz is not that of a known format.*set data\.format"),
        "missing": (path / "gone.txt", {}, r"data\.train: the file or folder .*gone\.txt does not exist"),
        "missing folder": ("./gone", {}, r"the file or folder \./gone does not exist"),
        "no match": (f"{path}/*.none", {}, r"no file matches the pattern"),
        "empty folder": (path / "empty", {}, r"holds no documents \(0 files"),
        "no such format": (
            path / "mixed",
            {"format": "parquet"},
            r"holds no documents \(2 files, none ending in parquet\)",
        ),
        "empty file": (path / "empty.txt", {}, r"no document to train on .*\(1 empty"),
        "empty records": (path / "empty.jsonl", {}, r"empty\.jsonl holds no records; leave it out"),
        "broken": (path / "broken.jsonl", {}, r"broken\.jsonl cannot be read"),
        "field": (
            path / "body.jsonl",
            {},
            r"lack the field 'text' \(they have 'body'\); set data\.text_field",
        ),
        "no text": (path / "numbers.jsonl", {}, r"holds int, not text"),
        "foreign tokens": (path / "tokens.jsonl", {}, r"not this model's .*1 to 999999"),
        "null": (path / "null.jsonl", {}, r"null\.jsonl are not lists of whole numbers: \[5, None, 7\]"),
        "number": (path / "number.jsonl", {}, r"number\.jsonl are not lists of whole numbers: 5"),
        "booleans": (path / "booleans.jsonl", {}, r"are not lists of whole numbers: \[True, False\]"),
        "nested": (path / "nested.jsonl", {}, r"are not lists of whole numbers: \[\[1, 2\]\]"),
        "unlike": (
            path / "unlike",
            {},
            r"the field 'id' is int in .*/a\.parquet and str in .*/b\.parquet; use one type",
        ),
        "text beside tokens": (
            path / "tokens.jsonl",
            {"text_field": "text"},
            r"lack the field 'text' \(they have 'input_ids'\)",
        ),
        "no parquet": (path / "notparquet.parquet", {}, r"notparquet\.parquet cannot be read"),
        "mixed": (path / "mixed", {}, r"several formats \(1 text, 1 json\); set data\.format"),
        "hub": (
            "nobody/nothing-here",
            {},
            r"nobody/nothing-here is neither a file or folder here nor a dataset .* hub",
        ),
        "validation": (path / "fine.txt", {"validation": ["./gone"]}, r"data\.validation: the file"),
    }


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "latin",
        "latin among others",
        "ending",
        "missing",
        "missing folder",
        "no match",
        "empty folder",
        "no such format",
        "empty file",
        "empty records",
        "broken",
        "field",
        "no text",
        "foreign tokens",
        "null",
        "number",
        "booleans",
        "nested",
        "unlike",
        "text beside tokens",
        "no parquet",
        "mixed",
        "hub",
        "validation",
    ],
)
def test_bad_input_is_one_sentence(
    build: Any, tmp_path: Path, name: str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    train, settings, says = bad_inputs(tmp_path)[name]
    if streaming and name == "empty file":
        says = "no document to train on"
    with pytest.raises(InPlaceTTTError, match=says) as error:
        build(train, streaming=streaming, **settings)
    message = str(error.value)
    assert "\n" not in message and message.endswith((".", ")."))
    assert "Traceback" not in message


@pytest.mark.parametrize("streaming", [False, True])
def test_a_package_that_is_missing_is_named(
    build: Any, tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        InPlaceTTTError, match="needs the package zstandard, which is not installed; pip install zstandard"
    ):
        build(tmp_path / "a.jsonl.zst", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "cp1252", "utf-32"])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "json"])
def test_other_encodings_are_named(
    build: Any, tmp_path: Path, ending: str, encoding: str, streaming: bool
) -> None:
    held = {"txt": "w1 é w2", "jsonl": '{"text": "w1 é w2"}\n' * 3, "json": '[{"text": "w1 é w2"}]'}[ending]
    (tmp_path / f"a.{ending}").write_bytes(held.encode(encoding))
    with pytest.raises(InPlaceTTTError, match=rf"a\.{ending}.* UTF-8|a\.{ending} (cannot be read|is not)"):
        list(build(tmp_path / f"a.{ending}", streaming=streaming).train)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_mark_of_a_text_file_is_not_trained_on(build: Any, tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + texts()[0].encode())
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + texts()[1].encode())
    assert documents(build(tmp_path, streaming=streaming).train) == [tokens(texts()[0]), tokens(texts()[1])]

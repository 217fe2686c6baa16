"""From files to rows: sources, order, split, cache, report, streams, and what is refused."""

import gzip
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, default_data_collator

import inplace_ttt.training.data as data_module
from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.training.data import TrainingData, build_data
from inplace_ttt.training.recipe import Data, Model, Optimisation, Parallel, Recall, Recipe

EOS, PAD = 1, 0
FIRST = 3  # the word w<n> is token n + FIRST
WORDS = 5000
LENGTHS = (50, 3, 1, 77, 20, 31, 8, 64, 100, 2)
LENGTH, CHUNK = 32, 8


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2, **{f"w{n}": n + FIRST for n in range(WORDS)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def texts(lengths: tuple[int, ...] = LENGTHS, first: int = 0) -> list[str]:
    """Documents whose words are all different."""
    ends = [first + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [" ".join(f"w{n}" for n in range(a, b)) for a, b in itertools.pairwise(ends)]


def tokens(text: str) -> list[int]:
    return [int(word[1:]) + FIRST for word in text.split()] + [EOS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The documents as text files; `.hidden.txt` is none of them."""
    (tmp_path / "text" / "deeper").mkdir(parents=True)
    for i, text in reversed(list(enumerate(texts()))):
        (tmp_path / "text" / ("deeper" if i == 4 else ".") / f"{'abcdefghij'[i]}.txt").write_text(text)
    (tmp_path / "text" / ".hidden.txt").write_text("w0")
    return tmp_path / "text"


@pytest.fixture
def build(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., TrainingData]:
    def run(train: Any, chunk_size: int = CHUNK, parallel: Parallel | None = None, **data: Any) -> TrainingData:
        names = [str(name) for name in (train if isinstance(train, list) else [train])]
        settings = {"sequence_length": LENGTH, "shuffle": False, "cache": str(tmp_path / "cache"), **data}
        return build_data(recipe(Data(train=names, **settings), parallel), tokenizer, chunk_size)

    return run


def recipe(data: Data, parallel: Parallel | None = None) -> Recipe:
    return Recipe(Model(path="none"), data, Optimisation(steps=1), output="none", parallel=parallel or Parallel())


def documents(rows: Any) -> list[list[int]]:
    """The documents of rows, those cut at a row's end put together again; every word tells where it stood."""
    found: list[list[int]] = []
    for row in rows:
        spans = ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], 1).documents[0]
        for start, stop in spans:
            piece = row["input_ids"][start:stop]
            if PAD in piece:
                continue
            if start == 0 and found and found[-1][-1] != EOS:
                found[-1] += piece
            else:
                found.append(piece)
    return found


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
        DatasetDict({"train": Dataset.from_list(records), "test": Dataset.from_list(records[:1])}).save_to_disk(path / "saved")
    elif kind == "arrow":
        Dataset.from_list(records).save_to_disk(path / "saved")
        shutil.move(path / "saved" / "data-00000-of-00001.arrow", path / "a.arrow")
        return path / "a.arrow"
    elif kind == "tokens":
        Dataset.from_list([{"input_ids": tokens(text), "n": 0} for text in texts()]).to_parquet(path / "a.parquet")
    return path / "saved" if (path / "saved").exists() else path


KINDS = ("jsonl", "json list", "jsonl.gz", "parquet", "saved", "saved splits", "arrow", "tokens")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(build: Any, folder: Path, tmp_path: Path, kind: str, streaming: bool) -> None:
    (tmp_path / "other").mkdir()
    found = build(write(tmp_path / "other", kind), streaming=streaming)
    assert isinstance(found.train, IterableDataset if streaming else Dataset)
    assert list(found.train) == list(build(folder).train)
    assert documents(found.train) == [tokens(text) for text in texts()]


def test_rows_are_lists_of_the_right_length(build: Any, folder: Path) -> None:
    for streaming in (False, True):
        found = build(folder, streaming=streaming)
        for row in found.train:
            assert list(row) == ["input_ids", "position_ids", "labels"]
            assert {(type(value), type(value[0]), len(value)) for value in row.values()} == {(list, int, LENGTH)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_usual_collator_makes_a_batch(build: Any, folder: Path, streaming: bool, workers: int) -> None:
    found = build(folder, streaming=streaming)
    batches = list(DataLoader(found.train, batch_size=2, collate_fn=default_data_collator, num_workers=workers))
    assert all(value.dtype == torch.int64 for value in batches[0].values())
    assert [row.tolist() for batch in batches for row in batch["labels"]] == [row["labels"] for row in found.train]


def test_folders_and_patterns_come_in_the_order_of_their_names(build: Any, folder: Path) -> None:
    by_name = [tokens(texts()["abcdefghij".index(name)]) for name in "abcdfghij"]
    assert documents(build(f"{folder}/*.txt").train) == by_name
    assert sorted(documents(build(folder).train)) == sorted(tokens(text) for text in texts())
    assert documents(build([folder / "c.txt", folder / "b.txt", f"{folder}/[ij].txt"]).train) == [tokens(texts()[i]) for i in (2, 1, 8, 9)]


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
    assert asked == [("owner/corpus", None, "all", False), ("corpus", "part", "all", False), ("owner/corpus", "part", "train[:5%]", False)]
    assert found.report.documents == 3 * len(LENGTHS)


def test_a_tokenizers_own_marks_are_kept_and_eos_stands_once(build: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A tokenizer that begins its texts with BOS does so here; one that ends them with EOS gets no second one; one without gets none."""
    from tokenizers import processors

    (tmp_path / "a.txt").write_text(texts()[0])
    data = Data(train=[str(tmp_path / "a.txt")], sequence_length=LENGTH, cache=str(tmp_path / "cache"))
    body = tokens(texts()[0])[:-1]
    for template, eos, expected in (("<unk> $A", "<eos>", [2, *body, EOS]), ("$A <eos>", "<eos>", [*body, EOS]), ("$A", None, body)):
        other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token=eos, pad_token="<pad>")
        other.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<unk>", 2), ("<eos>", EOS)]
        )
        found = build_data(recipe(data), other, CHUNK)
        assert [t for row in found.train for t in row["input_ids"] if t != PAD] == expected


def test_empty_documents_are_left_out(build: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("", None, " \n", texts()[0], "", texts()[3])))
    for streaming in (False, True):
        found = build(tmp_path / "a.jsonl", streaming=streaming)
        assert documents(found.train) == [tokens(texts()[0]), tokens(texts()[3])]
        assert found.report.documents == 2
    assert build(tmp_path / "a.jsonl").report.empty_documents == 4


class TestOrder:
    def test_is_that_of_the_seed(self, build: Any, folder: Path) -> None:
        for streaming in (False, True):
            first, again, other = (documents(build(folder, shuffle=True, seed=seed, streaming=streaming).train) for seed in (1, 1, 2))
            assert first == again
            assert first != other
            assert sorted(first) == sorted(other) == sorted(tokens(text) for text in texts())

    def test_shuffled_streams_take_turns(self, build: Any, folder: Path) -> None:
        files = sorted(folder.rglob("[a-j].txt"))
        (folder / "two.jsonl").write_text("".join(json.dumps({"text": file.read_text()}) + "\n" for file in files[5:]))
        (folder.parent / "one").mkdir()
        for file in files[:5]:
            shutil.move(file, folder.parent / "one")
        found = documents(build([folder.parent / "one", folder / "two.jsonl"], shuffle=True, streaming=True).train)
        assert sorted(found) == sorted(tokens(text) for text in texts())
        first_half = [tokens(text) for text in texts()[:5]]
        assert [document in first_half for document in found] == [True, False] * 5

    def test_a_stream_reads_as_the_file_does(self, build: Any, folder: Path) -> None:
        assert list(build(folder, streaming=True).train) == list(build(folder).train)

    def test_a_stream_resumes_where_it_was(self, build: Any, folder: Path) -> None:
        stream = build(folder, streaming=True, shuffle=True).train
        rows = list(stream)
        iterator = iter(stream)
        for _ in range(4):
            next(iterator)
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = build(folder, streaming=True, shuffle=True).train
        resumed.load_state_dict(state)
        assert list(resumed) == rows[4:]
        assert list(build(folder, streaming=True, shuffle=True).train.skip(4)) == rows[4:]


class TestHeldOut:
    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("wanted", [1, 3, 9])
    def test_no_document_stands_on_both_sides(self, build: Any, folder: Path, streaming: bool, shuffle: bool, wanted: int) -> None:
        found = build(folder, validation_documents=wanted, shuffle=shuffle, streaming=streaming, chunk_size=1)
        train, held = documents(found.train), documents(found.validation)
        assert len(held) == wanted == found.report.validation["documents"]
        assert sorted(train + held) == sorted(tokens(text) for text in texts())
        assert isinstance(found.validation, Dataset) and found.report.repeated == 0

    def test_the_seed_chooses(self, build: Any, folder: Path) -> None:
        chosen = {str(documents(build(folder, validation_documents=3, seed=seed).validation)) for seed in range(6)}
        assert len(chosen) > 2
        shuffled, plain = (documents(build(folder, validation_documents=3, shuffle=s).validation) for s in (True, False))
        assert shuffled == plain

    @pytest.mark.parametrize("streaming", [False, True])
    def test_copies_are_left_out_of_training(self, build: Any, folder: Path, streaming: bool) -> None:
        found = build(folder, validation=[str(folder / "a.txt"), str(folder / "d.txt")], streaming=streaming)
        assert documents(found.validation) == [tokens(texts()[0]), tokens(texts()[3])]
        assert sorted(documents(found.train)) == sorted(tokens(text) for i, text in enumerate(texts()) if i not in (0, 3))
        if not streaming:
            assert found.report.repeated == 2
            assert any("2 training documents stand in validation too" in warning for warning in found.report.warnings)

    def test_a_later_epoch_of_a_stream_keeps_out_of_validation(self, build: Any, folder: Path) -> None:
        found = build(folder, validation_documents=3, shuffle=True, streaming=True)
        held = documents(found.validation)
        for epoch in range(4):
            found.train.set_epoch(epoch)
            assert not [document for document in documents(found.train) if document in held]

    def test_nothing_left_is_refused(self, build: Any, folder: Path) -> None:
        with pytest.raises(InPlaceTTTError, match="holds 10 documents out of 10"):
            build(folder, validation_documents=10)
        with pytest.raises(InPlaceTTTError, match="no document to train on"):
            build(folder, validation_documents=10, streaming=True)


class TestCache:
    def test_tokenises_once(self, build: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = build(folder, shuffle=True, validation_documents=2)
        monkeypatch.setattr(data_module, "_tokenise", lambda *_, **__: pytest.fail("tokenised again"))
        again = build(folder, shuffle=True, validation_documents=2)
        assert list(again.train) == list(first.train)
        assert again.report == first.report
        longer = build(folder, shuffle=True, validation_documents=2, sequence_length=64)
        assert {len(row["labels"]) for row in longer.train} == {64}

    def test_outlives_the_process(self, build: Any, folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        first = build(folder)
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        code = f"""
import sys; sys.path[:0] = {sys.path!r}
from transformers import AutoTokenizer
import inplace_ttt.training.data as data
from test_data import recipe, Data
def never(*_, **__): raise AssertionError
data._tokenise = data.pack = never
settings = Data(train=[{str(folder)!r}], sequence_length={LENGTH}, shuffle=False, cache={str(tmp_path / "cache")!r})
print(data.build_data(recipe(settings), AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r}), {CHUNK}).report.sha256)
"""
        env_path = str(Path(__file__).parent)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=env_path)
        assert done.stdout.strip() == first.report.sha256, done.stderr[-2000:]

    def test_sees_a_changed_file_and_another_tokenizer(self, build: Any, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        first = build(folder)
        (folder / "a.txt").write_text("w4001 " * 60)
        changed = build(folder)
        assert changed.report.sha256 != first.report.sha256
        assert tokens("w4001 " * 60) in documents(changed.train)


class TestReport:
    def test_counts_what_the_rows_hold(self, build: Any, folder: Path) -> None:
        for align in (False, True):
            parallel = Parallel(processes=4, sequence_parallel=4) if align else None
            found = build(folder, shuffle=True, validation_documents=1, parallel=parallel)
            report, rows = found.report, list(found.train)
            spans = [
                (row, span)
                for row in rows
                for span in ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], 1).documents[0]
                if PAD not in row["input_ids"][slice(*span)]
            ]
            pieces = [stop - start for _, (start, stop) in spans]
            assert report.rows == len(rows) and report.pieces == len(pieces) and report.tokens == sum(pieces)
            assert report.padding == sum(row["input_ids"].count(PAD) for row in rows)
            assert report.padding_share == report.padding / (len(rows) * LENGTH)
            assert report.long_tokens == sum(n for n in pieces if n > CHUNK)
            assert report.long_share == report.long_tokens / report.tokens
            assert report.writes == sum((n - 1) // CHUNK for n in pieces)
            assert report.chunks_per_piece["max"] == max(-(-n // CHUNK) for n in pieces)
            assert report.documents == len(LENGTHS) - 1
            assert report.validation == {
                "documents": 1,
                "tokens": sum(map(len, documents(found.validation))),
                "rows": len(found.validation),
            }

    def test_is_plain_json_and_names_the_files(self, build: Any, folder: Path) -> None:
        values = json.loads(json.dumps(build(folder).report.to_dict()))
        (source,) = values["sources"]
        assert source["bytes"] == sum(len(text) for text in texts()) and len(source["files"]) == len(LENGTHS)
        assert source["role"] == "train" and source["kind"] == "text"

    def test_of_a_stream_is_about_its_start(self, build: Any, folder: Path) -> None:
        whole, small = build(folder, streaming=True), build(folder, streaming=True, sequence_length=16)
        assert not whole.report.sampled and whole.report.sha256 == build(folder).report.sha256
        assert small.report.sampled and small.report.documents < len(LENGTHS)

    @pytest.mark.parametrize("streaming", [False, True])
    def test_nothing_to_write_is_refused(self, build: Any, folder: Path, streaming: bool) -> None:
        with pytest.raises(InPlaceTTTError, match=r"no document is longer than one chunk of 32 tokens in rows of 32 .*lower chunk_size"):
            build(folder, chunk_size=32, streaming=streaming)
        assert build(folder, chunk_size=31, streaming=streaming).report.writes > 0

    def test_warns_when_little_trains_the_writer(self, build: Any, folder: Path) -> None:
        assert build(folder).report.warnings == []
        (warning,) = build(folder, sequence_length=64, chunk_size=62).report.warnings
        assert "only 17% of the tokens stand in pieces longer than one chunk of 62" in warning
        (warning,) = build(folder, sequence_length=256).report.warnings
        assert "29% of the rows is padding" in warning

    def test_warns_when_rows_repeat_within_a_step(self, folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        data = Data(train=[str(folder)], sequence_length=LENGTH, cache=str(tmp_path / "cache"))
        for accumulation, warnings in ((6, []), (7, ["one step reads 14 rows, but there are 12: rows repeat within a step"])):
            steps = Optimisation(steps=1, batch_size=2, accumulation=accumulation)
            found = build_data(Recipe(Model(path="none"), data, steps, output="none"), tokenizer, CHUNK)
            assert found.report.warnings == warnings and found.report.rows == 12


class TestSequenceParallel:
    def test_documents_start_on_chunks(self, build: Any, folder: Path) -> None:
        found = build(folder, parallel=Parallel(processes=2, sequence_parallel=2))
        assert documents(found.train) == [tokens(text) for text in texts()]
        for row in found.train:
            layout = ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], CHUNK)
            assert all(a // CHUNK == (b - 1) // CHUNK for document in layout.documents[0] for a, b in layout.chunks(document))

    def test_rank_borders_off_the_chunks_are_refused(self, build: Any, folder: Path) -> None:
        with pytest.raises(InPlaceTTTError, match=r"32 over 2 .* gives each 16 tokens, which is no multiple of chunk_size 12; .* of 24"):
            build(folder, chunk_size=12, parallel=Parallel(processes=2, sequence_parallel=2))


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
    (path / "notparquet.parquet").write_text("hello")
    (path / "mixed").mkdir()
    (path / "mixed" / "a.txt").write_text("w1")
    (path / "mixed" / "b.jsonl").write_text('{"text": "w1"}')
    return {
        "latin": (path / "latin.txt", {}, r"latin\.txt is not UTF-8 text"),
        "latin among others": (f"{path}/[fl]*.txt", {}, r"/latin\.txt is not UTF-8 text"),
        "ending": (path / "a.xyz", {}, r"ending of .*a\.xyz names no format .*set data\.format"),
        "missing": (path / "gone.txt", {}, r"data\.train: there is no file or folder .*gone\.txt"),
        "missing folder": ("./gone", {}, r"there is no file or folder \./gone"),
        "no match": (f"{path}/*.none", {}, r"no file matches the pattern"),
        "empty folder": (path / "empty", {}, r"holds no documents \(0 files"),
        "no such format": (path / "mixed", {"format": "parquet"}, r"holds no documents \(2 files, none ending in parquet\)"),
        "empty file": (path / "empty.txt", {}, r"no document to train on .*\(1 empty"),
        "empty records": (path / "empty.jsonl", {}, r"empty\.jsonl"),
        "broken": (path / "broken.jsonl", {}, r"broken\.jsonl cannot be read"),
        "field": (path / "body.jsonl", {}, r"no field 'text' \(they have 'body'\); set data\.text_field"),
        "no text": (path / "numbers.jsonl", {}, r"holds int, not text"),
        "foreign tokens": (path / "tokens.jsonl", {}, r"not those of this tokenizer .*1 to 999999"),
        "no parquet": (path / "notparquet.parquet", {}, r"notparquet\.parquet cannot be read"),
        "mixed": (path / "mixed", {}, r"several formats \(1 text, 1 json\); set data\.format"),
        "hub": ("nobody/nothing-here", {}, r"nobody/nothing-here is no file or folder here, and no dataset .* hub"),
        "validation": (path / "fine.txt", {"validation": ["./gone"]}, r"data\.validation: there is no file"),
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
        "no parquet",
        "mixed",
        "hub",
        "validation",
    ],
)
def test_bad_input_is_one_sentence(build: Any, tmp_path: Path, name: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    train, settings, says = bad_inputs(tmp_path)[name]
    if streaming and name == "empty file":
        says = "no document to train on"
    with pytest.raises(InPlaceTTTError, match=says) as error:
        build(train, streaming=streaming, **settings)
    message = str(error.value)
    assert "\n" not in message and message.endswith((".", ")."))
    assert "Traceback" not in message


def test_a_cache_that_cannot_be_written_is_named(build: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InPlaceTTTError, match=r"cannot keep the tokenised data in .*file.*set data\.cache"):
        build(folder, cache=str(tmp_path / "file"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_document_of_a_million_tokens(build: Any, tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "long.txt").write_text("w7 " * 1_000_000)
    found = build(tmp_path / "long.txt", sequence_length=65536, chunk_size=4096, streaming=streaming)
    assert found.report.tokens == 1_000_001 and found.report.rows == 16
    assert sum(1 for _ in found.train) == 16


def test_recall_needs_no_tokenizer() -> None:
    data = Data(recall=Recall(pairs=4, vocabulary=32, rows=6), sequence_length=64, validation_documents=3)
    found = build_data(recipe(data), None, 16)
    assert len(found.train) == 6 and found.validation is not None and len(found.validation) == 3
    assert found.report.writes == 6 * 3
    assert not {tuple(ids) for ids in found.train["input_ids"]} & {tuple(ids) for ids in found.validation["input_ids"]}
    wide = Recipe(Model(config={"model_type": "llama", "vocab_size": 31}), data, Optimisation(steps=1), output="none")
    with pytest.raises(InPlaceTTTError, match=r"data\.recall\.vocabulary is 32, but model\.config\.vocab_size is 31"):
        build_data(wide, None, 16)

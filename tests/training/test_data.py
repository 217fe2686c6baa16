"""From documents to rows: order, split, cache, report, streams."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import word_level
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, default_data_collator

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.layout import ChunkLayout
from inplace_ttt.training.data import cached
from inplace_ttt.training.data.building import TrainingData
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.recipe.data_section import Data, Recall
from inplace_ttt.training.recipe.recipe import Recipe
from inplace_ttt.training.recipe.sections import Model, Parallel
from inplace_ttt.training.recipe.training_section import Training

from .corpus import CHUNK, EOS, FIRST, LENGTH, LENGTHS, PAD, WORDS, documents, recipe, texts, tokens


def test_rows_are_lists_of_the_right_length(build: Any, folder: Path) -> None:
    for streaming in (False, True):
        found = build(folder, streaming=streaming)
        for row in found.train:
            assert list(row) == ["input_ids", "position_ids", "labels"]
            assert {(type(value), type(value[0]), len(value)) for value in row.values()} == {
                (list, int, LENGTH)
            }


def test_a_document_of_many_rows_is_read_once(
    build: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each batch of rows, not for each row."""
    taken: list[tuple[int, int]] = []
    read = Dataset.__getitem__

    def noted(self: Dataset, key: Any) -> Any:
        if isinstance(key, slice) and self.column_names == ["input_ids"]:
            taken.append((key.start, key.stop))
        return read(self, key)

    monkeypatch.setattr(Dataset, "__getitem__", noted)
    rows = len(build(folder).train)
    assert rows > 10 and taken == [(0, len(LENGTHS))]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_usual_collator_makes_a_batch(build: Any, folder: Path, streaming: bool, workers: int) -> None:
    found = build(folder, streaming=streaming)
    batches = list(
        DataLoader(found.train, batch_size=2, collate_fn=default_data_collator, num_workers=workers)
    )
    assert all(value.dtype == torch.int64 for value in batches[0].values())
    assert [row.tolist() for batch in batches for row in batch["labels"]] == [
        row["labels"] for row in found.train
    ]


@pytest.mark.parametrize("align", [1, CHUNK])
def test_every_piece_begins_as_its_document(align: int, folder: Path, tmp_path: Path) -> None:
    """Stored, streamed, and streamed from any row on; documents that do not begin as the tokenizer begins
    texts are counted."""
    begun, begins = word_level((f"w{n}" for n in range(WORDS)), 2), [EOS, EOS]
    parallel = Parallel(nproc_per_node=2, sequence_parallel_size=2) if align > 1 else None

    def built(train: Path, **settings: Any) -> TrainingData:
        data = Data(
            train=[str(train)],
            sequence_length=LENGTH,
            shuffle=False,
            cache=str(tmp_path / "cache"),
            **settings,
        )
        return build_data(recipe(data, parallel), begun, CHUNK)

    stored, streamed = built(folder), built(folder, streaming=True)
    rows = list(stored.train)
    assert rows == list(streamed.train)
    assert not any("begin" in warning for data in (stored, streamed) for warning in data.report.warnings)
    found = []
    for row in rows:
        spans = ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], 1).documents[0]
        found += [piece for start, stop in spans if PAD not in (piece := row["input_ids"][start:stop])]
    assert all(piece[:2] == begins[: len(piece)] for piece in found)
    assert [token for piece in found for token in piece if token >= FIRST] == list(
        range(FIRST, FIRST + sum(LENGTHS))
    )
    assert (stored.report.rows, stored.report.tokens, stored.report.pieces) == (
        len(rows),
        sum(map(len, found)),
        len(found),
    )
    seen = list(itertools.islice(whole := streamed.train.from_row(0), 30))
    for n in range(0, 27, 4):
        assert list(itertools.islice(streamed.train.from_row(whole.position(n)), 3)) == seen[n : n + 3]
    Dataset.from_list(
        [{"input_ids": [*begins, *range(3, 40)]}, {"input_ids": list(range(40, 80))}]
    ).to_parquet(tmp_path / "a.parquet")
    for streaming in (False, True):
        given = built(tmp_path / "a.parquet", streaming=streaming)
        assert any(
            warning.startswith("1 of 2 documents do not begin with the special tokens")
            for warning in given.report.warnings
        )
        assert [row["input_ids"][:2] == begins for row in given.train][:2] == [True, True]


class TestCache:
    def test_tokenizes_once(self, build: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = build(folder, shuffle=True, validation_documents=2)
        monkeypatch.setattr(cached, "tokenize", lambda *_, **__: pytest.fail("tokenized again"))
        again = build(folder, shuffle=True, validation_documents=2)
        assert list(again.train) == list(first.train)
        assert again.report == first.report
        longer = build(folder, shuffle=True, validation_documents=2, sequence_length=64)
        assert {len(row["labels"]) for row in longer.train} == {64}

    def test_several_processes_make_the_same(
        self, build: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cache of one is the cache of the other; what is wrong with a document is said in one sentence
        by either."""
        one, two = (
            build(folder, shuffle=True),
            build(folder, shuffle=True, processes=2, cache=str(tmp_path / "another")),
        )
        assert list(one.train) == list(two.train) and one.report == two.report
        assert len(list((tmp_path / "another").glob("inplace-ttt-tokens-*_of_00002.arrow"))) == 2
        monkeypatch.setattr(cached, "tokenize", lambda *_, **__: pytest.fail("tokenized again"))
        assert list(build(folder, shuffle=True, cache=str(tmp_path / "another")).train) == list(two.train)
        monkeypatch.undo()
        (folder / "numbers.jsonl").write_text('{"text": 3}\n' * 4)
        with pytest.raises(
            InPlaceTTTError,
            match=r"^the field 'text' of \S*numbers.jsonl holds int, not text; set data\.text_field\.$",
        ):
            build(folder / "numbers.jsonl", processes=2)

    @pytest.mark.full
    def test_outlives_the_process(
        self, build: Any, folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        first = build(folder)
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        code = f"""
import sys; sys.path[:0] = {sys.path!r}
from transformers import AutoTokenizer
from inplace_ttt.training.data import cached, data
from corpus import recipe, Data
def never(*_, **__): raise AssertionError
cached.tokenize = cached.pack = never
settings = Data(train=[{str(folder)!r}], sequence_length={LENGTH}, shuffle=False, cache={str(tmp_path / "cache")!r})
print(data.build_data(recipe(settings), AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r}), {CHUNK}).report.sha256)
"""
        env_path = str(Path(__file__).parent)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=env_path)
        assert done.stdout.strip() == first.report.sha256, done.stderr[-2000:]

    def test_sees_a_changed_file_and_another_tokenizer(
        self, build: Any, folder: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        first = build(folder)
        (folder / "a.txt").write_text("w4001 " * 60)
        changed = build(folder)
        assert changed.report.sha256 != first.report.sha256
        assert tokens("w4001 " * 60) in documents(changed.train)


class TestReport:
    def test_counts_what_the_rows_hold(self, build: Any, folder: Path) -> None:
        for align in (False, True):
            parallel = Parallel(nproc_per_node=4, sequence_parallel_size=4) if align else None
            found = build(folder, shuffle=True, validation_documents=1, parallel=parallel)
            report, rows = found.report, list(found.train)
            spans = [
                (row, span)
                for row in rows
                for span in ChunkLayout.from_position_ids(
                    torch.tensor(row["position_ids"])[None], 1
                ).documents[0]
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
        with pytest.raises(
            InPlaceTTTError,
            match=r"no document is longer than one chunk of 32 tokens in rows of 32 .*lower chunk_size",
        ):
            build(folder, chunk_size=32, streaming=streaming)
        assert build(folder, chunk_size=31, streaming=streaming).report.writes > 0

    def test_warns_when_little_trains_the_writer(self, build: Any, folder: Path) -> None:
        assert build(folder).report.warnings == []
        (warning,) = build(folder, sequence_length=64, chunk_size=62).report.warnings
        assert "only 17% of the tokens are in pieces longer than one chunk of 62" in warning
        (warning,) = build(folder, sequence_length=256).report.warnings
        assert "29% of the rows is padding" in warning

    def test_warns_when_rows_repeat_within_a_step(
        self, folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        data = Data(train=[str(folder)], sequence_length=LENGTH, cache=str(tmp_path / "cache"))
        for accumulation, warnings in (
            (6, []),
            (7, ["one step reads 14 rows, but there are 12: rows repeat within a step"]),
        ):
            steps = Training(steps=1, batch_size=2, gradient_accumulation_steps=accumulation)
            found = build_data(Recipe(Model(path="none"), data, steps, output="none"), tokenizer, CHUNK)
            assert found.report.warnings == warnings and found.report.rows == 12


class TestSequenceParallel:
    def test_documents_start_on_chunks(self, build: Any, folder: Path) -> None:
        found = build(folder, parallel=Parallel(nproc_per_node=2, sequence_parallel_size=2))
        assert documents(found.train) == [tokens(text) for text in texts()]
        for row in found.train:
            layout = ChunkLayout.from_position_ids(torch.tensor(row["position_ids"])[None], CHUNK)
            assert all(
                a // CHUNK == (b - 1) // CHUNK
                for document in layout.documents[0]
                for a, b in layout.chunks(document)
            )

    def test_rank_borders_off_the_chunks_are_refused(self, build: Any, folder: Path) -> None:
        with pytest.raises(
            InPlaceTTTError,
            match=r"Each of 2 ranks gets 16 tokens, which are not whole chunks of 12; .* of 24",
        ):
            build(folder, chunk_size=12, parallel=Parallel(nproc_per_node=2, sequence_parallel_size=2))


def test_a_cache_that_cannot_be_written_is_named(build: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InPlaceTTTError, match=r"cannot keep the tokenized data in .*file.*set data\.cache"):
        build(folder, cache=str(tmp_path / "file"))


def test_recall_needs_no_tokenizer() -> None:
    data = Data(recall=Recall(pairs=4, vocabulary=32, rows=6), sequence_length=64, validation_documents=3)
    found = build_data(recipe(data), None, 16)
    assert len(found.train) == 6 and found.validation is not None and len(found.validation) == 3
    assert found.report.writes == 6 * 3
    assert not {tuple(ids) for ids in found.train["input_ids"]} & {
        tuple(ids) for ids in found.validation["input_ids"]
    }
    wide = Recipe(
        Model(config={"model_type": "llama", "vocab_size": 31}), data, Training(steps=1), output="none"
    )
    with pytest.raises(
        InPlaceTTTError, match=r"data\.recall\.vocabulary is 32, but model\.config\.vocab_size is 31"
    ):
        build_data(wide, None, 16)

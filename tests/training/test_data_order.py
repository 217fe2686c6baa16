"""The order of rows, of files and of streams, and the split into training and validation."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.training.data import streams
from inplace_ttt.training.data.row_order import rows_to_come, save_position
from inplace_ttt.training.data.streams import Position
from inplace_ttt.training.data.tokenizing import tokenize
from inplace_ttt.training.recipe.data_section import Data

from .corpus import documents, recipe, texts, tokens


class TestOrder:
    def test_is_that_of_the_seed(self, build: Any, folder: Path) -> None:
        for streaming in (False, True):
            first, again, other = (
                documents(build(folder, shuffle=True, seed=seed, streaming=streaming).train)
                for seed in (1, 1, 2)
            )
            assert first == again
            assert first != other
            assert sorted(first) == sorted(other) == sorted(tokens(text) for text in texts())

    def test_shuffled_streams_take_turns(self, build: Any, folder: Path) -> None:
        files = sorted(folder.rglob("[a-j].txt"))
        (folder / "two.jsonl").write_text(
            "".join(json.dumps({"text": file.read_text()}) + "\n" for file in files[5:])
        )
        (folder.parent / "one").mkdir()
        for file in files[:5]:
            shutil.move(file, folder.parent / "one")
        found = documents(
            build([folder.parent / "one", folder / "two.jsonl"], shuffle=True, streaming=True).train
        )
        assert sorted(found) == sorted(tokens(text) for text in texts())
        first_half = [tokens(text) for text in texts()[:5]]
        assert [document in first_half for document in found] == [True, False] * 5

    def test_a_stream_reads_as_the_file_does(self, build: Any, folder: Path) -> None:
        assert list(build(folder, streaming=True).train) == list(build(folder).train)

    @pytest.mark.parametrize("kind", ["text", "jsonl", "weights", "in order"])
    def test_a_stream_goes_on_from_any_row_at_once(
        self,
        build: Any,
        folder: Path,
        kind: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Also in later passes. It tokenizes what the row needs, and no more than a batch of each source that
        was read before."""
        monkeypatch.setattr(streams, "_BATCH", 2)
        names: Any = folder
        if kind != "text":
            texts_of = [file.read_text() for file in sorted(folder.rglob("[a-j].txt"))]
            names = [folder / "one.jsonl", folder / "two.jsonl"]
            for name, part in zip(names, (texts_of[:6], texts_of[6:]), strict=True):
                name.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        settings = {"weights": [0.8, 0.2]} if kind == "weights" else {}
        stream = build(
            names, streaming=True, shuffle=kind != "in order", validation_documents=1, **settings
        ).train
        whole = stream.from_row(0)
        rows = list(itertools.islice(whole, 40))  # more than three passes
        assert len({str(row) for row in rows}) > 12
        positions = [json.loads(json.dumps(whole.position(n).to_dict())) for n in range(40)]
        read: list[int] = []
        monkeypatch.setattr(
            streams,
            "tokenize",
            lambda batch, **settings: read.append(len(batch["text"])) or tokenize(batch, **settings),
        )
        again = build(
            names, streaming=True, shuffle=kind != "in order", validation_documents=1, **settings
        ).train
        for n in range(0, 40, 3):
            read.clear()
            assert (
                list(itertools.islice(again.from_row(Position.from_dict(positions[n])), 1)) == rows[n : n + 1]
            )
            assert sum(read) <= 12 < 30
        assert list(itertools.islice(again.from_row(Position.from_dict(positions[7])), 33)) == rows[7:]
        assert list(itertools.islice(again.from_row(7), 33)) == rows[7:], (
            "an old checkpoint without a position"
        )
        with pytest.raises(LookupError, match="the row after 4 is not among the last 2"):
            list(itertools.islice(short := again.from_row(0, 2), 9)) and short.position(4)
        assert "shuffle buffer" not in caplog.text

    def test_a_position_that_is_damaged_is_named(self, build: Any, folder: Path, tmp_path: Path) -> None:
        stream, given = build(folder, streaming=True).train, recipe(Data(train=["x"]))
        rows = rows_to_come(stream, given, 1)
        first = list(itertools.islice(rows, 3))
        save_position(rows, given, 2, tmp_path)
        assert list(itertools.islice(rows_to_come(stream, given, 2, tmp_path), 2)) == first[1:]
        (tmp_path / "rows.json").write_text('{"rows": 2, "places": [{"nothing": 1}], "used": 0}')
        with pytest.raises(
            InPlaceTTTError,
            match=r"rows\.json cannot be read .*; remove it, and the run makes the earlier rows again\.$",
        ):
            rows_to_come(stream, given, 2, tmp_path)


class TestHeldOut:
    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("wanted", [1, 3, 9])
    def test_no_document_stands_on_both_sides(
        self, build: Any, folder: Path, streaming: bool, shuffle: bool, wanted: int
    ) -> None:
        found = build(folder, validation_documents=wanted, shuffle=shuffle, streaming=streaming, chunk_size=1)
        train, held = documents(found.train), documents(found.validation)
        assert len(held) == wanted == found.report.validation["documents"]
        assert sorted(train + held) == sorted(tokens(text) for text in texts())
        assert isinstance(found.validation, Dataset) and found.report.repeated == 0

    def test_the_seed_chooses(self, build: Any, folder: Path) -> None:
        chosen = {
            str(documents(build(folder, validation_documents=3, seed=seed).validation)) for seed in range(6)
        }
        assert len(chosen) > 2
        shuffled, plain = (
            documents(build(folder, validation_documents=3, shuffle=s).validation) for s in (True, False)
        )
        assert shuffled == plain

    @pytest.mark.parametrize("streaming", [False, True])
    def test_copies_are_left_out_of_training(self, build: Any, folder: Path, streaming: bool) -> None:
        found = build(folder, validation=[str(folder / "a.txt"), str(folder / "d.txt")], streaming=streaming)
        assert documents(found.validation) == [tokens(texts()[0]), tokens(texts()[3])]
        assert sorted(documents(found.train)) == sorted(
            tokens(text) for i, text in enumerate(texts()) if i not in (0, 3)
        )
        if not streaming:
            assert found.report.repeated == 2
            assert any(
                "2 training documents are in validation too" in warning for warning in found.report.warnings
            )

    def test_a_later_epoch_of_a_stream_keeps_out_of_validation(self, build: Any, folder: Path) -> None:
        found = build(folder, validation_documents=3, shuffle=True, streaming=True)
        held = documents(found.validation)
        passes = documents(itertools.islice(found.train.from_row(0), 50))
        assert len(passes) > 28 and not [document for document in passes if document in held]

    def test_nothing_left_is_refused(self, build: Any, folder: Path) -> None:
        with pytest.raises(InPlaceTTTError, match="holds out 10 of 10 documents"):
            build(folder, validation_documents=10)
        with pytest.raises(InPlaceTTTError, match="no document to train on"):
            build(folder, validation_documents=10, streaming=True)

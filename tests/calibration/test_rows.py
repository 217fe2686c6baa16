"""Which rows of texts a calibration reads: as many tokens as it is told, of texts spread over all of them."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from tiny import save_base, text, word_level
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from inplace_ttt import cli
from inplace_ttt.calibration.rows import ROW, calibration_rows
from inplace_ttt.texts.documents import documents_in


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_level(f"t{i}" for i in range(3, 1000))


def texts(folder: Path, lengths: list[int]) -> list[Path]:
    """Files of so many tokens, file i starting with token 3 + i."""
    files = [folder / f"{i:03}.txt" for i in range(len(lengths))]
    for i, (file, length) in enumerate(zip(files, lengths, strict=True)):
        file.write_text(" ".join(f"t{3 + (i + n) % 997}" for n in range(length)))
    return files


@pytest.mark.parametrize(
    ("lengths", "asked", "rows"),
    [
        ([50_000], 16_000, [(0, 2000)] * 8),
        ([70] * 200, 32_768, None),
        ([3000, 3000], 10_000, [(0, 2000), (1, 2000), (0, 1000), (1, 1000)]),
        ([3000, 70], 2000, [(0, 2000)]),
        ([70, 3000], 2000, [(0, 70), (1, 2000)]),
        ([2049, 300], 4096, [(0, 2048), (1, 300)]),
        ([3000] * 5, 5 * 2500, [(i, 1786) for i in range(5)] + [(i, 1214) for i in range(3)]),
        ([2500] * 60, 16_384, [(i, 1821) for i in range(0, 60, 7)]),
        ([2500] * 7 + [1700] + [2500] * 52, 16_384, [(i, 1700 if i == 7 else 1821) for i in range(0, 60, 7)]),
        (
            [2500] * 7 + [70] + [2500] * 52,
            16_384,
            [(i, 70 if i == 7 else 1821) for i in range(0, 60, 7)] + [(1, 1821)],
        ),
    ],
)
def test_rows_until_there_are_enough(
    lengths: list[int],
    asked: int,
    rows: list[tuple[int, int]] | None,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = documents_in(texts(tmp_path, lengths))
    found = calibration_rows(files, tokenizer, asked)
    if rows is not None:
        assert [(files.index(file), row.shape[1]) for file, row in found] == rows
    read = sum(row.shape[1] for _, row in found)
    assert all(row.shape[1] <= ROW for _, row in found)
    if read < asked * 63 // 64:
        assert f"read all {read:,} tokens" in caplog.text and sum(lengths) - read < 16 * len(files)
    else:
        assert not caplog.text
    for file in set(files):  # what is read of a text is its beginning, once
        of_it = torch.cat(
            [row[0] for other, row in found if other == file] or [torch.zeros(0, dtype=torch.int64)]
        )
        assert of_it.tolist() == [3 + (files.index(file) + n) % 997 for n in range(len(of_it))]


def test_every_row_begins_as_a_text_does(tmp_path: Path) -> None:
    tokenizer = word_level(f"t{i}" for i in range(3, 1000))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    (file,) = texts(tmp_path, [3000])
    rows = [row[0].tolist() for _, row in calibration_rows(documents_in([file]), tokenizer, 4000)]
    assert [len(row) for row in rows] == [2000, 1002] and all(
        row[0] == 1 and 1 not in row[1:] for row in rows
    )
    assert [token for row in rows for token in row[1:]] == [3 + n % 997 for n in range(3000)]


def test_a_card_names_the_texts_that_were_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(tmp_path / "base")
    (tmp_path / "texts").mkdir()
    files = [tmp_path / "texts" / f"{i}.txt" for i in range(4)]
    for i, file in enumerate(files):
        file.write_text(text(400, seed=i))
    arguments = [
        "convert",
        str(base),
        str(tmp_path / "out"),
        "--preset",
        "ridge",
        "--layers",
        "0",
        "--set",
        "whitening.rank=5",
    ]
    assert (
        cli.main(
            [*arguments, "--no-verify", "--calibrate", str(tmp_path / "texts"), "--calibrate-tokens", "100"]
        )
        == 0
    )
    said = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()["inplace_ttt"]["calibration"]
    assert (said["files"], said["tokens"]) == (
        ["0.txt"],
        100,
    ) and "calibration read" not in capsys.readouterr().err

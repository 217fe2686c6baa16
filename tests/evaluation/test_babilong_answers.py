"""`inplace-ttt babilong`: its table, batches, interruptions, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from inplace_ttt import cli
from inplace_ttt.evaluation.long_context import answers
from inplace_ttt.evaluation.long_context.answers import answer

LENGTH = 1500
BASIC = ["--lengths", str(LENGTH), "--tasks", "qa1,qa4", "--samples", "3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("babilong")
    tiny.save_converted(tiny.save_base(folder / "base"), folder / "ttt")
    (folder / "book.txt").write_text(tiny.text(3000), encoding="utf-8")
    (folder / "books").mkdir()
    (folder / "books" / "a.txt").write_text(tiny.text(300, seed=1), encoding="utf-8")
    (folder / "endless.txt").write_text("sea " * 500)
    (folder / "latin1.txt").write_bytes("Ahab's château".encode("latin-1"))
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def babilong(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["babilong", "ttt", "--text", "book.txt", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def test_one_table_for_on_off_and_base(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--lengths", str(LENGTH), "--samples", "2", "--base", "base", "--out", str(tmp_path / "out")]
    result = babilong(capsys, *arguments)
    assert result["tasks"] == ["qa1", "qa2", "qa3", "qa4", "qa5"]
    for row in result["rows"]:
        assert all(0.98 * LENGTH <= n + 20 <= LENGTH for n in row["tokens"])
        for name in ("on", "off", "base"):
            assert (
                0 <= row[name]["low"] <= row[name]["share"] <= row[name]["high"] <= 1 and row[name]["n"] == 2
            )
        assert row["difference"]["mean"] == pytest.approx(row["on"]["share"] - row["off"]["share"])
    (average,) = result["averages"]
    assert average["on"]["n"] == 10 and result["warnings"] == []
    said = {name: file["predictions"] for name, file in kept(tmp_path / "out").items()}
    assert all(
        said[f"off-qa{i}-{LENGTH}"] == said[f"base-qa{i}-{LENGTH}"] != said[f"on-qa{i}-{LENGTH}"]
        for i in range(1, 6)
    )
    assert cli.main(["babilong", "ttt", "--text", "book.txt", *arguments]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["1,500", "tokens", "chance", "shallow", "on", "off", "base", "on", "-", "off"]
    assert (
        table[6].startswith("average of 5")
        and "Wilson's 95 % intervals, of 2 samples per task, seed 0" in table[-1]
    )


def test_the_figures_are_those_of_what_was_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TTT on two of three are answered rightly, with TTT off the first alone."""
    right = iter([True, True, False, True, False, False])

    def known(model: Any, tokenizer: Any, batch: Any, budget: int) -> list[str]:
        return [f" {sample.draft.answers[0]}.\n" if next(right) else "the sea" for sample in batch]

    monkeypatch.setattr(answers, "answer", known)
    out = tmp_path / "out"
    result = babilong(
        capsys, "--lengths", LENGTH, "--tasks", "qa4", "--samples", "3", "--batch-size", "3", "--out", out
    )
    (row,), (average,) = result["rows"], result["averages"]
    assert row["on"] == pytest.approx({"share": 2 / 3, "low": 0.2077, "high": 0.9385, "n": 3}, abs=1e-4)
    assert row["off"]["share"] == pytest.approx(1 / 3) and row["difference"]["mean"] == pytest.approx(1 / 3)
    assert row["chance"] == average["chance"] == 0.5 and average["on"] == row["on"]
    file = kept(out)[f"on-qa4-{LENGTH}"]
    assert file["scores"] == [100, 100, 0] and file["predictions"][2] == "the sea"
    assert all(
        len(options) == 2 and right in options
        for options, (right,) in zip(file["options"], file["answers"], strict=True)
    )
    best = max(
        sum(pick[rule] == right for pick, (right,) in zip(file["guesses"], file["answers"], strict=True))
        for rule in range(3)
    )
    assert row["shallow"] == pytest.approx(best / 3)
    assert file["asked"]["task"] == "qa4" and len(file["asked"]["text"]) == 64
    assert (
        cli.main(
            [
                "babilong",
                "ttt",
                "--text",
                "book.txt",
                *BASIC[:2],
                "--tasks",
                "qa4",
                "--samples",
                "3",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert (
        " ".join(capsys.readouterr().out.splitlines()[1].split())
        == f"qa4 50 {100 * best / 3:.0f} 67 (21 to 94) 33 (6 to 79) +33.3 ± 33.3"
    )


def test_a_batch_answers_as_its_rows_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for size in (1, 3):
        babilong(capsys, *BASIC, "--batch-size", size, "--out", tmp_path / str(size))
    assert kept(tmp_path / "1") == kept(tmp_path / "3")


def test_a_run_that_was_stopped_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = babilong(capsys, *BASIC, "--out", tmp_path / "whole")
    answered: list[str] = []

    def counted(model: Any, tokenizer: Any, batch: Any, budget: int) -> list[str]:
        if len(answered) == 8:
            raise KeyboardInterrupt
        answered.extend(sample.task for sample in batch)
        return answer(model, tokenizer, batch, budget)

    monkeypatch.setattr(answers, "answer", counted)
    assert cli.main(["babilong", "ttt", "--text", "book.txt", *BASIC, "--out", str(tmp_path / "part")]) == 130
    assert list(kept(tmp_path / "part")) == [f"off-qa1-{LENGTH}", f"on-qa1-{LENGTH}"]
    answered.clear()
    assert babilong(capsys, *BASIC, "--out", tmp_path / "part") == whole
    assert answered == ["qa4"] * 6, "what was there has been made again"


def test_results_of_another_text_or_seed_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [
        "babilong",
        "ttt",
        "--lengths",
        str(LENGTH),
        "--tasks",
        "qa4",
        "--samples",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert cli.main([*arguments, "--text", "book.txt"]) == 0
    assert cli.main([*arguments, "--text", "book.txt", "--seed", "1"]) == 2
    assert "was made with seed 0, not 1; choose another --out" in capsys.readouterr().err
    assert cli.main([*arguments, "--text", "books"]) == 2
    assert "was made with text '" in capsys.readouterr().err


def test_the_samples_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They are those that the model is asked; a base will do."""
    arguments = [
        "babilong",
        "base",
        "--text",
        "book.txt",
        *BASIC,
        "--write-samples",
        str(tmp_path / "s"),
        "--json",
    ]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["written"] == 6
    babilong(capsys, *BASIC, "--out", tmp_path / "out")
    for name in ("qa1", "qa4"):
        lines = [
            json.loads(line) for line in (tmp_path / "s" / f"{name}-{LENGTH}.jsonl").read_text().splitlines()
        ]
        asked = kept(tmp_path / "out")[f"on-{name}-{LENGTH}"]
        assert [(line["outputs"], line["options"]) for line in lines] == list(
            zip(asked["answers"], asked["options"], strict=True)
        )
        assert [line["length"] - line["tokens_to_generate"] for line in lines] == asked["tokens"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["base", "--lengths", "1500", "--text", "book.txt"], "not a converted checkpoint"),
        (["ttt", "--lengths", "1500"], "required: --text"),
        (["ttt", "--text", "book.txt"], "required: --lengths"),
        (["ttt", "--lengths", "4k", "--text", "book.txt"], "must be whole numbers"),
        (
            ["ttt", "--lengths", "1500", "--text", "book.txt", "--samples", "0"],
            "--samples must be at least 1",
        ),
        (
            ["ttt", "--lengths", "1500", "--text", "book.txt", "--tasks", "qa6"],
            "task 'qa6' does not exist; --tasks takes qa1,",
        ),
        (
            ["ttt", "--lengths", "1500", "--text", "nowhere.txt"],
            "the file or folder nowhere.txt does not exist",
        ),
        (["ttt", "--lengths", "1500", "--text", "latin1.txt"], "cannot read latin1.txt"),
        (
            ["ttt", "--lengths", "1500", "--text", "endless.txt"],
            "endless.txt holds no sentences of up to 200 words",
        ),
        (
            ["ttt", "--lengths", "1500", "--text", "base"],
            "the records of base lack the field 'text' (they have",
        ),
        (["ttt", "--lengths", "1500,200", "--text", "book.txt", "--tasks", "qa4"], "qa4 needs at least"),
        (
            ["ttt", "--lengths", "1500", "--text", "book.txt", "--base", "ttt"],
            "is a converted checkpoint; --base takes",
        ),
        (
            ["ttt", "--lengths", "1500", "--text", "book.txt", "--write-samples", "base"],
            "base exists already",
        ),
    ],
)
def test_bad_input(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["babilong", *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("inplace-ttt")]
    assert out == "" and len(lines) == 1 and says in lines[0], err

"""`inplace-ttt evaluate`: the contract's JSON, what it writes, and one line for bad input."""

import json
from pathlib import Path

import pytest
from tiny import CHUNK, byte_level, save_base, save_converted, save_llama, text, word_level

from inplace_ttt import cli
from inplace_ttt.files.manifest import MANIFEST


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("evaluate")
    save_converted(save_base(made / "base"), made / "model")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 4096}
    save_llama(made / "other", byte_level(("<pad>", "<s>", "</s>", "<a>", "<b>")), **sizes)
    save_llama(made / "small", word_level(["a", "b"]), **sizes)
    (made / "texts" / "below").mkdir(parents=True)
    for i in range(5):
        (made / "texts" / ("below" if i else "") / f"{i}.txt").write_text(text(300 + 20 * i, seed=i))
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["evaluate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_contract(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = [
        "--base",
        folder / "base",
        "--window",
        32,
        "--repeated-passage",
        "--passage",
        "40,50",
        "--contexts",
        "70,140",
        "--block",
        32,
    ]
    how += ["--facts", 1, "--distances", "64,200"]
    out = tmp_path / "out"
    values = json.loads(
        run(
            capsys,
            folder / "model",
            "--text",
            folder / "texts",
            *how,
            "--out",
            out,
            "--batch-size",
            2,
            "--json",
        )
    )
    assert values["off"] == pytest.approx(values["base"], abs=1e-5), (
        "only conv and P were set: off is the base"
    )
    assert values["on"] != values["off"] != values["mismatched"]
    for key in ("difference", "document_gain", "gain", "generic_gain"):
        assert (
            values[key].keys() == {"mean", "stderr", "n"}
            and values[key]["n"] == 5
            and values[key]["stderr"] > 0
        )
    assert values["protocol"] == {"window": 32, "sinks": 4, "skip": CHUNK, "batch_size": 2, "begins": []}
    assert (
        values["read"].items()
        >= {
            "path": str(folder / "model"),
            "base": str(folder / "base"),
            "dtype": "float32",
            "seed": 0,
        }.items()
    )
    for name, mean in (("off", values["off"]), ("own_minus_mismatched", values["document_gain"]["mean"])):
        assert sum(row[name] for row in values["documents"]) / 5 == pytest.approx(mean, abs=1e-5)
    assert len(values["documents"]) == 5 and values["repeated_passage"]["repeated_passage"]["n"] == 5
    assert [row["context"] for row in values["contexts"]] == [70, 140]
    assert values["facts"]["documents"] == 5
    assert values["facts"]["readings"].keys() == {"on", "state_only", "mismatched", "off", "bm25", "full"}
    assert {f.name for f in out.iterdir()} == {
        MANIFEST,
        "evaluation.json",
        "positions.png",
        "documents.png",
        "contexts.png",
        "facts.png",
    }
    assert json.loads((out / "evaluation.json").read_text()) == {
        k: v for k, v in values.items() if k != "output"
    }


def test_the_same_command_gives_the_same_numbers_and_a_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (folder / "model", "--text", folder / "texts", "--documents", 3, "--tokens", 200)
    assert (first := run(capsys, *arguments)) == run(capsys, *arguments)
    cached = (*arguments, "--cache", tmp_path / "cache")
    assert first == run(capsys, *cached) == run(capsys, *cached) and any((tmp_path / "cache").iterdir())
    assert "on - mismatched" in first and "3 documents" in first and "facts" not in first
    asked = run(capsys, *arguments, "--facts", 2, "--distances", 64)
    assert "facts, 2 records in each of 3 documents" in asked and "after 64 tokens, two hops (6)" in asked
    alone = run(capsys, folder / "model", "--text", folder / "texts" / "0.txt")
    assert "needs the state of another document" in alone


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", "nowhere.txt"], "the file or folder nowhere.txt does not exist"),
        (["--text", "EMPTY"], "holds no text"),
        (["--text", "LATIN"], "give a UTF-8 text file"),
        (["--text", "SHORT"], f"chunks of {CHUNK}"),
        (["--text", "TEXTS", "--documents", "9"], "only 5 of the texts"),
        (["--text", "TEXTS", "--window", "3", "--sinks", "3"], "does not exist"),
        (["--text", "TEXTS", "--repeated-passage"], "give longer documents, or a shorter passage"),
        (["--text", "TEXTS", "--contexts", "4000"], "shorter context"),
        (["--text", "TEXTS", "--contexts", "a"], "whole numbers separated by commas"),
        (["--text", "TEXTS", "--repeated-passage", "--passage", "5"], "a length and a gap"),
        (["--text", "TEXTS", "--passage", "5,5"], "does nothing without --repeated-passage"),
        (["--text", "TEXTS", "--sinks", "2"], "does nothing without --window"),
        (["--text", "TEXTS", "--block", "9"], "does nothing without --contexts"),
        (["--text", "TEXTS", "--distances", "9"], "does nothing without --facts"),
        (["--text", "TEXTS", "--seed", "1"], "--seed does nothing without --repeated-passage or --facts"),
        (["--text", "TEXTS", "--overwrite"], "--overwrite does nothing without --out"),
        (["--text", "TEXTS", "--base", "OTHER"], "another tokenizer"),
        (["--text", "TEXTS", "--base", "SMALL"], "it is not the base of this model"),
        (["--text", "TEXTS", "--facts", "999"], "at most 25"),
        (["--text", "TEXTS", "--facts", "2", "--distances", "9,0"], "above 0"),
        (["--text", "TEXTS", "--facts", "2", "--distances", "9999"], "give more text"),
        (["--text", "TEXTS", "--tokens", "0"], "at least 1"),
        (["--text", "TEXTS", "--skip", "-1"], "0 or more"),
        (["--text", "FOLDER"], "holds no documents"),
        (["--text", "TEXTS", "--out", "TEXTS"], "is an input of this command"),
        (["--text", "TEXTS", "--base", "nowhere/at/all"], "nowhere/at/all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 200)
    (tmp_path / "short.txt").write_text("the sea a whale")
    (tmp_path / "folder").mkdir()
    places = {
        "TEXTS": folder / "texts",
        "FOLDER": tmp_path / "folder",
        "OTHER": folder / "other",
        "SMALL": folder / "small",
    } | {n.upper(): tmp_path / f"{n}.txt" for n in ("empty", "latin", "short")}
    capsys.readouterr()
    assert cli.main(["evaluate", str(folder / "model"), *(str(places.get(a, a)) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("inplace-ttt")]
    assert out == "" and len(lines) == 1 and says in lines[0] and "Traceback" not in err, err


def test_an_unconverted_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(folder / "base"), "--text", str(folder / "texts")]) == 2
    assert "not a converted checkpoint" in capsys.readouterr().err


def test_of_a_long_document_only_the_start_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(text(300) * 2000)
    (tmp_path / "b.txt").write_text(text(300, seed=1) * 2000)
    values = json.loads(run(capsys, folder / "model", "--text", tmp_path, "--tokens", 150, "--json"))
    assert [d["tokens"] for d in values["documents"]] == [150, 150]

"""What `inplace-ttt ruler` refuses: bad input, and results of another run."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from inplace_ttt import cli, load

from .ruler_runs import LENGTH


@pytest.fixture(autouse=True)
def _there(ruler_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ruler_folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["base", "--lengths", "1024", "--tasks", "fwe"], "not a converted checkpoint"),
        (["ttt"], "required: --lengths"),
        (["ttt", "--lengths", "4k"], "must be whole numbers"),
        (["ttt", "--lengths", "0"], "must be above 0"),
        (["ttt", "--lengths", "1024", "--samples", "0"], "--samples must be at least 1"),
        (["ttt", "--lengths", "1024", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["ttt", "--lengths", "1024", "--tasks", "niah"], "task 'niah' does not exist"),
        (
            ["ttt", "--lengths", "1024"],
            "niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue, niah_multiquery hide needles",
        ),
        (["ttt", "--lengths", "1024", "--tasks", "qa_1"], "qa_1 needs questions; give a file"),
        (["ttt", "--lengths", "1024", "--tasks", "qa_2", "--qa", "questions.jsonl"], "give two files"),
        (
            ["ttt", "--lengths", "1024", "--tasks", "fwe", "--dtype", "half-a-byte"],
            "is not a dtype of weights",
        ),
        (["ttt", "--lengths", "200", "--tasks", "fwe"], "fwe needs at least"),
        (
            ["ttt", "--lengths", "1024", "--tasks", "niah_single_2", "--haystack", "nowhere.txt"],
            "the file or folder nowhere.txt does not exist",
        ),
        (
            ["ttt", "--lengths", "1024", "--tasks", "niah_single_2", "--haystack", "latin1.txt"],
            "cannot read latin1.txt",
        ),
        (
            ["ttt", "--lengths", "1024", "--tasks", "niah_single_2", "--haystack", "empty.txt"],
            "empty.txt holds no text",
        ),
        (["ttt", "--lengths", "1024", "--tasks", "qa_1", "--qa", "latin1.txt"], "cannot read latin1.txt"),
        (["ttt", "--lengths", "1024", "--tasks", "qa_1", "--qa", "short.txt"], "short.txt is not JSON"),
        (
            ["ttt", "--lengths", "1024", "--tasks", "qa_1", "--qa", "questions.jsonl", "--samples", "41"],
            "has 40 questions",
        ),
        (
            ["ttt", "--lengths", "1024", "--tasks", "fwe", "--base", "ttt"],
            "is a converted checkpoint; --base takes",
        ),
        (
            ["ttt", "--lengths", "1024", "--tasks", "fwe", "--base", "elsewhere"],
            "elsewhere has another tokenizer",
        ),
        (["no-tokenizer", "--lengths", "1024", "--tasks", "fwe"], "no-tokenizer lacks a usable tokenizer"),
        (
            ["large-tokenizer", "--lengths", "1024", "--tasks", "fwe"],
            "has the tokenizer of another model: it gives ids up to",
        ),
        (["ttt", "--lengths", "1024", "--tasks", "fwe", "--out", "book.txt"], "cannot write to book.txt"),
        (["ttt", "--lengths", "1024", "--tasks", "fwe", "--write-samples", "base"], "base exists already"),
        (
            ["ttt", "--lengths", "1024", "--tasks", "fwe", "--write-samples", "s", "--out", "o"],
            "--out does nothing with --write-samples",
        ),
        (
            ["ttt", "--lengths", "1024", "--tasks", "fwe", "--write-samples", "s", "--base", "base"],
            "--base does nothing with",
        ),
    ],
)
def test_bad_input(
    arguments: list[str], says: str, ruler_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ruler_folder / "latin1.txt").write_bytes("Ahab's château".encode("latin-1"))
    (ruler_folder / "empty.txt").write_text(" \n")
    (ruler_folder / "short.txt").write_text("Call me Ishmael. Some years")
    if "tokenizer" in arguments[0] and not (ruler_folder / arguments[0]).exists():
        load("ttt").save_pretrained(ruler_folder / arguments[0])
        if arguments[0].startswith("large"):
            words = tiny.tokenizer()
            words.add_tokens([f"<{i}>" for i in range(500)])
            words.save_pretrained(ruler_folder / arguments[0])
    if "elsewhere" in arguments and not (ruler_folder / "elsewhere").exists():
        AutoModelForCausalLM.from_pretrained("base").save_pretrained("elsewhere")
        words = tiny.tokenizer()
        words.add_tokens(["magic"])
        words.save_pretrained("elsewhere")
    assert cli.main(["ruler", *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("inplace-ttt")]
    assert out == "" and len(lines) == 1 and says in lines[0], err


def test_results_of_other_settings_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [
        "ruler",
        "ttt",
        "--lengths",
        "1024",
        "--tasks",
        "fwe",
        "--samples",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--seed", "1"]) == 2
    assert "was made with seed 0, not 1; choose another --out" in capsys.readouterr().err
    (tmp_path / f"on-fwe-{LENGTH}.json").write_text("{")
    assert cli.main(arguments) == 2
    assert "is not a result of this command" in capsys.readouterr().err


def test_results_of_other_writes_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The weights are the same, the chunks are not; off has neither."""
    tiny.save_converted(tiny.save_base(tmp_path / "base"), tmp_path / "ttt")
    arguments = [
        "ruler",
        str(tmp_path / "ttt"),
        "--lengths",
        "1024",
        "--tasks",
        "fwe",
        "--samples",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli.main(arguments) == 0
    config = json.loads((tmp_path / "ttt" / "config.json").read_text())
    config["inplace_ttt"]["config"]["eta"] = 0.5
    (tmp_path / "ttt" / "config.json").write_text(json.dumps(config))
    assert cli.main(arguments) == 2
    assert "on-fwe-1024.json was made with config" in capsys.readouterr().err


def test_results_of_other_weights_or_tokens_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whatever the answers depend on, to the last number: a weight far into a tensor, a token's merges, the
    chat template."""
    made, out = tmp_path / "ttt", str(tmp_path / "out")
    tiny.save_converted(tiny.save_base(tmp_path / "base"), made)
    arguments = [
        "ruler",
        str(made),
        "--lengths",
        "1024",
        "--tasks",
        "fwe",
        "--samples",
        "1",
        "--chat",
        "--out",
        out,
    ]
    assert cli.main(arguments) == 0
    words, template = made / "tokenizer.json", made / "chat_template.jinja"
    settings = json.loads(words.read_text())
    settings["model"]["merges"] = settings["model"]["merges"][:-20]
    for file, other in ((words, json.dumps(settings)), (template, "Briefly. " + template.read_text())):
        before = file.read_text()
        file.write_text(other)
        assert cli.main(arguments) == 2
        assert "on-fwe-1024.json was made with tokenizer" in capsys.readouterr().err
        file.write_text(before)
    model = load(made)
    with torch.no_grad():
        model.get_output_embeddings().weight.flatten()[-1] += 1.0
    model.save_pretrained(made)
    assert cli.main(arguments) == 2
    assert "on-fwe-1024.json was made with model" in capsys.readouterr().err


def test_a_length_that_cannot_be_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """1,024 tokens can be asked and are, were 64 not among the lengths."""
    arguments = [
        "--lengths",
        "1024,64",
        "--tasks",
        "niah_single_2",
        "--haystack",
        "book.txt",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(["ruler", "ttt", *arguments]) == 2
    assert "but must fit 64; raise --lengths or leave it out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

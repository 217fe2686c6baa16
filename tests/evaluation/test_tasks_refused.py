"""What `inplace-ttt evaluate --tasks` refuses: bad input, and results of another run."""

import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from inplace_ttt import cli, load

from .task_runs import LENGTH, refusal

FWE = f"--tasks ruler_fwe --lengths {LENGTH}"


@pytest.fixture(autouse=True)
def _there(tasks_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tasks_folder)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (f"base {FWE}", "not a converted checkpoint"),
        ("ttt", "evaluate needs --text TEXT with documents to read, or --tasks TASK"),
        ("ttt --tasks ruler_fwe", "ruler_fwe needs a length; give --lengths"),
        ("ttt --tasks mine.yaml --lengths 1024", "--lengths does nothing for lm-eval's own tasks"),
        ("ttt --tasks ruler_fwe --lengths 4k", "must be whole numbers"),
        ("ttt --tasks ruler_fwe --lengths 0", "must be above 0"),
        (f"ttt {FWE} --samples 0", "--samples must be at least 1"),
        (f"ttt {FWE} --batch-size 0", "--batch-size must be at least 1"),
        ("ttt --tasks mine.yaml,,ruler_vt --lengths 1024", "task '' does not exist; --tasks takes ruler, babilong,"),
        ("ttt --tasks ruler --lengths 1024", "ruler_niah_single_2 hides sentences in a text; give one with --text"),
        ("ttt --tasks babilong_qa1 --lengths 1024", "babilong_qa1 hides sentences in a text; give one with --text"),
        ("ttt --tasks ruler_qa_1 --lengths 1024", "ruler_qa_1 needs questions; give a file"),
        ("ttt --tasks ruler_qa_2 --lengths 1024 --qa questions.jsonl", "give two files"),
        ("ttt --tasks ruler_qa_2 --lengths 1024 --qa q q q", "--qa takes a file for ruler_qa_1 and one for"),
        (f"ttt {FWE} --dtype half-a-byte", "is not a dtype of weights"),
        ("ttt --tasks ruler_fwe --lengths 200", "ruler_fwe needs at least"),
        ("ttt --tasks babilong_qa4 --lengths 1500,200 --text book.txt", "babilong_qa4 needs at least"),
        ("ttt --tasks ruler_niah_single_2 --lengths 1024 --text nowhere.txt", "or folder nowhere.txt does not exist"),
        ("ttt --tasks babilong --lengths 1024 --text latin1.txt", "cannot read latin1.txt"),
        ("ttt --tasks ruler_niah_single_2 --lengths 1024 --text empty.txt", "empty.txt holds no text"),
        ("ttt --tasks babilong --lengths 1500 --text endless.txt", "endless.txt holds no sentences of up to 200 words"),
        ("ttt --tasks babilong --lengths 1500 --text base", "the records of base lack the field 'text' (they have"),
        ("ttt --tasks ruler_qa_1 --lengths 1024 --qa latin1.txt", "cannot read latin1.txt"),
        ("ttt --tasks ruler_qa_1 --lengths 1024 --qa short.txt", "short.txt is not JSON"),
        ("ttt --tasks ruler_qa_1 --lengths 1024 --qa questions.jsonl --samples 41", "has 40 questions"),
        (f"ttt {FWE} --base ttt", "is a converted checkpoint; --base takes"),
        (f"ttt {FWE} --base elsewhere", "elsewhere has another tokenizer"),
        (f"no-tokenizer {FWE}", "no-tokenizer lacks a usable tokenizer"),
        (f"large-tokenizer {FWE}", "has the tokenizer of another model: it gives ids up to"),
        (f"endless-tokenizer {FWE}", "the tokenizer lacks an end-of-text token, which lm-eval needs"),
        (f"ttt {FWE} --out book.txt", "cannot write to book.txt"),
        (f"ttt {FWE} --write-samples base", "base exists already"),
        (f"ttt {FWE} --write-samples s --out o", "--out does nothing with --write-samples"),
        (f"ttt {FWE} --write-samples s --base base", "--base does nothing with"),
        ("ttt --tasks mine.yaml --write-samples s", "--write-samples writes RULER's and BABILong's tasks, not 'mine"),
        (f"ttt {FWE} --window 64", "--window does nothing with --tasks"),
        (f"ttt {FWE} --overwrite --out o", "--overwrite does nothing with --tasks"),
        ("ttt --text book.txt --lengths 1024", "--lengths does nothing without --tasks"),
        ("ttt --tasks broken.yaml", "lm-eval cannot load broken.yaml"),
        ("ttt --tasks unsafe.yaml", "runs code that the model writes"),
    ],
)  # fmt: skip
def test_bad_input(command: str, says: str, tasks_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tasks_folder / "latin1.txt").write_bytes("Ahab's château".encode("latin-1"))
    (tasks_folder / "empty.txt").write_text(" \n")
    (tasks_folder / "short.txt").write_text("Call me Ishmael. Some years")
    (tasks_folder / "endless.txt").write_text("sea " * 500)
    (tasks_folder / "mine.yaml").write_text("task: mine\n")
    (tasks_folder / "broken.yaml").write_text("task: broken\ndataset_path: json\n")
    (tasks_folder / "rows.jsonl").write_text('{"text": "the sea"}\n')
    (tasks_folder / "unsafe.yaml").write_text(
        "task: unsafe\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        'unsafe_code: true\ndoc_to_text: "{{text}}"\ndoc_to_target: ""\noutput_type: generate_until\n'
    )
    name = command.split()[0]
    if "tokenizer" in name and not (tasks_folder / name).exists():
        load("ttt").save_pretrained(tasks_folder / name)
        words = tiny.tokenizer()
        if name.startswith("large"):
            words.add_tokens([f"<{i}>" for i in range(500)])
        elif name.startswith("endless"):
            words.eos_token = None
        if not name.startswith("no-"):
            words.save_pretrained(tasks_folder / name)
    if "elsewhere" in command and not (tasks_folder / "elsewhere").exists():
        AutoModelForCausalLM.from_pretrained("base").save_pretrained("elsewhere")
        words = tiny.tokenizer()
        words.add_tokens(["magic"])
        words.save_pretrained("elsewhere")
    assert says in refusal(capsys, *command.split(" "))


def test_without_lm_eval_one_sentence_names_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert (
        "--tasks needs lm-eval, which is not installed; in a checkout of inplace-ttt, pip install -e '.[eval]'"
        in (refusal(capsys, "ttt", *FWE.split()))
    )


@pytest.mark.full
def test_a_name_that_lm_eval_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    """To know all its names takes lm-eval half a minute here."""
    assert "task 'niah' does not exist; --tasks takes" in refusal(capsys, "ttt", "--tasks", "niah")


def test_results_of_other_settings_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["ttt", *FWE.split(), "--samples", "1", "--out", str(tmp_path)]
    assert cli.main(["evaluate", *arguments]) == 0
    assert "was made with seed 0, not 1; choose another --out" in refusal(capsys, *arguments, "--seed", "1")
    (tmp_path / f"on-ruler_fwe-{LENGTH}.json").write_text("{")
    assert "is not a result of this command" in refusal(capsys, *arguments)


def test_results_of_another_text_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tasks_folder: Path
) -> None:
    (tasks_folder / "another.txt").write_text(tiny.text(3000, seed=1), encoding="utf-8")
    arguments = [
        "ttt",
        *["--tasks", "babilong_qa4", "--samples", "1", "--lengths"],
        LENGTH,
        "--out",
        tmp_path,
    ]
    assert cli.main(["evaluate", *map(str, arguments), "--text", "book.txt"]) == 0
    assert "was made with text '" in refusal(capsys, *arguments, "--text", "another.txt")


def test_results_of_other_writes_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The weights are the same, the chunks are not; off has neither."""
    tiny.save_converted(tiny.save_base(tmp_path / "base"), tmp_path / "ttt")
    arguments = [str(tmp_path / "ttt"), *FWE.split(), "--samples", "1", "--out", str(tmp_path / "out")]
    assert cli.main(["evaluate", *arguments]) == 0
    config = json.loads((tmp_path / "ttt" / "config.json").read_text())
    config["inplace_ttt"]["config"]["eta"] = 0.5
    (tmp_path / "ttt" / "config.json").write_text(json.dumps(config))
    assert f"on-ruler_fwe-{LENGTH}.json was made with config" in refusal(capsys, *arguments)


def test_results_of_other_weights_or_tokens_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whatever the answers depend on, to the last number: a weight far into a tensor, a token's merges, the
    chat template."""
    made = tmp_path / "ttt"
    tiny.save_converted(tiny.save_base(tmp_path / "base"), made)
    arguments = [str(made), *FWE.split(), "--samples", "1", "--chat", "--out", str(tmp_path / "out")]
    assert cli.main(["evaluate", *arguments]) == 0
    words, template = made / "tokenizer.json", made / "chat_template.jinja"
    settings = json.loads(words.read_text())
    settings["model"]["merges"] = settings["model"]["merges"][:-20]
    for file, other in ((words, json.dumps(settings)), (template, "Briefly. " + template.read_text())):
        before = file.read_text()
        file.write_text(other)
        assert f"on-ruler_fwe-{LENGTH}.json was made with tokenizer" in refusal(capsys, *arguments)
        file.write_text(before)
    model = load(made)
    with torch.no_grad():
        model.get_output_embeddings().weight.flatten()[-1] += 1.0
    model.save_pretrained(made)
    assert f"on-ruler_fwe-{LENGTH}.json was made with model" in refusal(capsys, *arguments)


def test_a_length_that_cannot_be_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """1,024 tokens can be asked and are, were 64 not among the lengths."""
    arguments = [
        "ttt",
        "--tasks",
        "ruler_niah_single_2",
        "--lengths",
        "1024,64",
        "--text",
        "book.txt",
        "--out",
    ]
    assert "but must fit 64; raise --lengths or leave it out" in refusal(capsys, *arguments, tmp_path)
    assert list(tmp_path.iterdir()) == []

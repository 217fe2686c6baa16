"""What the command line does with whatever goes wrong, and with streams that are closed or full."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTError, cli
from inplace_ttt.cli import info
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.recipe import load_recipe

from .fuzz_run import run
from .fuzz_world import copy_of, in_folder, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("boundary") / "world")


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    return copy_of(world, tmp_path / "world")


def refused(folder: Path, command: str) -> str:
    arguments = in_folder(folder, command.split())
    outcome = run(arguments, folder)
    assert outcome.code == 2 and outcome.problem(arguments) is None, outcome
    return outcome.err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RuntimeError("deep\n\n  inside"), 2, "unexpected RuntimeError: deep; set INPLACE_TTT_TRACEBACK=1"),
        (KeyError("x"), 2, "unexpected KeyError"),
        (RecursionError(), 2, "unexpected RecursionError"),
        (MemoryError(), 2, "not have enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "not have enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_whatever_goes_wrong_is_one_line(
    error: BaseException,
    code: int,
    says: str,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: Any) -> Any:
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert cli.main(["info", "x"] + ["--json"] * as_json) == code
    out, err = capsys.readouterr()
    assert err.startswith("inplace-ttt info: ") and says in err and err.count("\n") == 1
    assert (json.loads(out) if as_json else out) == (
        {"error": err.removeprefix("inplace-ttt info: ").strip(), "exit_code": code} if as_json else ""
    )


def test_the_traceback_comes_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.TRACEBACK, "1")
    assert cli.main(["info", str(tmp_path)]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback") and last.startswith("inplace-ttt info: ")


@pytest.mark.parametrize(
    "arguments", [["--json"], ["melt", "--json"], ["info", "--json"], ["info", "x", "--jso", "--base"]]
)
def test_a_command_that_is_none_is_answered_in_json_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


@pytest.mark.full
def test_a_reader_that_stops_early_is_no_error(folder: Path) -> None:
    """As a shell leaves it, standard input closed as well."""
    line = f"set -o pipefail; {sys.executable} -m inplace_ttt.cli info ttt <&- | true"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_streams_that_are_closed_or_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", None)
        assert "cannot read the prompt -" in refused(folder, "generate ttt --prompt-file -")
    capsys.readouterr()
    with monkeypatch.context() as patch, open("/dev/full", "w") as full:
        patch.setattr("sys.stdout", full)
        assert cli.main(["info", str(folder / "ttt")]) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is left in the buffer
    assert (
        capsys.readouterr().err
        == "inplace-ttt info: cannot write the result to standard output: No space left on device.\n"
    )
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, open(write, "w") as broken:
        patch.setattr("sys.stdout", broken)
        assert cli.main(["info", str(folder / "ttt")]) == 141


def test_names_that_no_terminal_can_spell(folder: Path) -> None:
    name = os.fsdecode(b"\xff")
    os.symlink(folder / "ttt", folder / name)
    outcome = run(
        ["convert", str(folder / "base"), str(folder / "out" / name), "--layers", "0", "--no-verify"], folder
    )
    assert outcome.code == 0 and not outcome.escaped and "\\udcff" in outcome.out, outcome


def test_a_model_of_no_numbers_answers_nothing(folder: Path) -> None:
    shard = folder / "ttt" / "base-model.safetensors"
    tensors = load_file(shard)
    tensors["lm_head.weight"][3, 5] = float("nan")
    shard.unlink()
    save_file(tensors, shard, {"format": "pt"})
    for options in (
        "generate ttt --prompt-file text.txt",
        "generate ttt --prompt-file text.txt --temperature 1",
        "evaluate ttt --text text.txt",
    ):
        assert "lm_head.weight holds numbers that are not finite" in refused(folder, options)


@pytest.mark.parametrize(
    "asked",
    [{"num_beams": 4}, {"num_return_sequences": 2}, {"use_cache": False}, {"return_dict_in_generate": True}],
)
def test_a_generation_config_that_a_session_cannot_follow(asked: dict[str, Any], folder: Path) -> None:
    file = folder / "ttt" / "generation_config.json"
    values = {**json.loads(file.read_text()), **asked}
    file.unlink()
    file.write_text(json.dumps(values))
    assert next(iter(asked)) in refused(folder, "generate ttt --prompt-file text.txt --temperature 1")


def test_a_tokenizer_larger_than_its_model(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "ttt")
    tokenizer.add_tokens([f"<{i}>" for i in range(99)])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "ttt" / name).unlink()
    tokenizer.save_pretrained(folder / "ttt")
    for command in (
        "generate ttt --prompt-file text.txt",
        "evaluate ttt --text text.txt",
        "diagnose ttt --text text.txt --out out",
    ):
        assert "has the tokenizer of another model" in refused(folder, command)


def test_special_tokens_beyond_the_embeddings(folder: Path) -> None:
    """As Gemma 3's for images: no text holds them."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "ttt")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image {i}>" for i in range(99)]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "ttt" / name).unlink()
    tokenizer.save_pretrained(folder / "ttt")
    outcome = run(in_folder(folder, ["evaluate", "ttt", "--text", "text.txt"]), folder)
    assert outcome.code == 0, outcome


def test_a_base_that_is_written_over_is_noticed(world: Path, tmp_path: Path) -> None:
    """Its shards are hard links: a copy over the base is a change of the converted checkpoint."""
    base = tmp_path / "base"
    base.mkdir()
    for file in (world / "base").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    convert = [
        "convert",
        str(base),
        str(tmp_path / "ttt"),
        "--layers",
        "0",
        "--chunk-size",
        "8",
        "--no-verify",
    ]
    assert cli.main(convert) == 0 and cli.main(["info", str(tmp_path / "ttt")]) == 0
    shard = base / "model.safetensors"
    tensors = {name: tensor + 1 for name, tensor in load_file(shard).items()}
    save_file(tensors, tmp_path / "other", {"format": "pt"})
    shard.write_bytes((tmp_path / "other").read_bytes())  # as cp does
    assert "was changed after it was linked here" in refused(tmp_path, f"info {tmp_path / 'ttt'}")
    assert cli.main([*convert, "--overwrite"]) == 0 and cli.main(["info", str(tmp_path / "ttt")]) == 0
    shard.unlink()
    # as a new download does: another file
    shard.write_bytes((world / "base" / "model.safetensors").read_bytes())
    assert cli.main(["info", str(tmp_path / "ttt")]) == 0


def test_sizes_that_this_machine_has_not_the_memory_for(folder: Path) -> None:
    assert "of memory" in refused(
        folder, "bench --d 1000000 --h 1000000 --tokens 16 --chunk-size 16 --repeats 1"
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("vocab_size: 128", "vocab_size: 2000000000"))
    with pytest.raises(InPlaceTTTError, match="of memory"):
        build_model(load_recipe(recipe))

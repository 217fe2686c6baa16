"""Bad input on the command line: exit code 2, one line that helps, nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint.folders import bytes_of, save_base
from families import build
from safetensors.torch import load_file, save_file

from inplace_ttt import cli

TINY = ["--layers", "0", "--chunk-size", "4", "--no-verify"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


@pytest.fixture
def converted(base: Path, tmp_path: Path) -> Path:
    assert cli.main(["convert", str(base), str(tmp_path / "ttt"), *TINY]) == 0
    return tmp_path / "ttt"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that refuses a command."""
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("inplace-ttt")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: VERB"),
        (["melt"], "invalid choice: 'melt'"),
        (["generate", "BASE", "--prompt-file", "x", "--read", "y"], "--read y; did you mean --readings?"),
        (["convert", "BASE", "OUT", "--calib", "x"], "--calib x; did you mean --calibrate?"),
        (["bench", "extra"], "inplace-ttt bench: unrecognized arguments: extra (see"),
        (["convert"], "required: SRC, OUT"),
        (["convert", "./no/such/model", "OUT"], "does not exist"),
        (["convert", "nobody/nothing", "OUT"], "neither a folder nor a model that can be downloaded"),
        (
            ["convert", "BASE", "OUT", "--chunk-size", "0"],
            "chunk_size must be an integer of at least 1, got 0",
        ),
        (["convert", "BASE", "OUT", "--chunk-size", "x"], "invalid int value"),
        (
            ["convert", "BASE", "OUT", "--layers", "0,3"],
            "layers [3] do not exist: the model has 3 layers, 0 to 2",
        ),
        (["convert", "BASE", "OUT", "--layers", "first"], "--layers must be every:N, upper:N or indices"),
        (["convert", "BASE", "OUT", "--eta", "-1"], "eta must be a number of at least 0"),
        (["convert", "BASE", "OUT", "--eta", "nan"], "eta must be a number"),
        (["convert", "BASE", "OUT", "--target", "labels"], "target must be one of"),
        (
            ["convert", "BASE", "OUT", "--preset", "best"],
            "preset 'best' does not exist; choose one of paper, reference",
        ),
        (["convert", "BASE", "BASE"], "is an input of this command"),
        (["convert", "BASE", "/proc/nowhere/out"], "cannot write"),
        (["info", "BASE"], "not a converted checkpoint"),
        (["generate", "BASE", "--prompt-file", "TEXT"], "not a converted checkpoint"),
        (["export", "BASE", "OUT", "--format", "adapter"], "does not name the base"),
        (["export", "BASE", "OUT", "--format", "full"], "is a full checkpoint already"),
        (["import-reference", "BASE", "OUT"], "not a checkpoint of the reference code"),
        (
            ["bench", "--tokens", "10", "--chunk-size", "4"],
            "10 tokens are not a multiple of the chunk size 4",
        ),
        (["bench", "--d", "1"], "--d must be at least 2"),
        (
            ["convert", "BASE", "OUT", "--calibrate-tokens", "8"],
            "--calibrate-tokens does nothing without --calibrate",
        ),
        (
            ["convert", "BASE", "OUT", "--chunk-size", "4", "--set", "chunk_size=8"],
            "--chunk-size does nothing next to --set chunk_size=8",
        ),
        (
            ["info", "BASE", "--base", "OUT"],
            "is not an adapter folder, so it needs no base",
        ),
        (
            ["export", "BASE", "OUT", "--format", "reference", "--base", "OUT"],
            "is not an adapter folder, so it needs no base",
        ),
        (["serve", "BASE", "--api-key", ""], "--api-key must not be empty"),
        (
            ["generate", "BASE", "--prompt-file", "TEXT", "--save-state", "TEXT"],
            "is a file that this command did not write, so it is not replaced",
        ),
        (["generate", "BASE", "--prompt-file", "TEXT", "--save-state", "OUT/state"], "cannot write next to"),
    ],
)
def test_arguments(
    arguments: list[str], message: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a text")
    places = {
        "BASE": str(base),
        "OUT": str(tmp_path / "out"),
        "TEXT": str(tmp_path / "text"),
        "OUT/state": str(tmp_path / "out" / "state"),
    }
    before = bytes_of(tmp_path)
    assert message in refused(capsys, *(places.get(a, a) for a in arguments))
    assert bytes_of(tmp_path) == before


def test_not_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, broken, vision = (tmp_path / name for name in ("empty", "broken", "vision"))
    for folder in (empty, broken, vision):
        folder.mkdir()
    assert "does not exist" in refused(capsys, "convert", empty, tmp_path / "out")
    (broken / "config.json").write_text("{")
    assert "cannot be read" in refused(capsys, "convert", broken, tmp_path / "out")
    (broken / "config.json").write_text("[]")
    assert "not a JSON object" in refused(capsys, "convert", broken, tmp_path / "out")
    (vision / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert "lacks model.safetensors" in refused(capsys, "convert", vision, tmp_path / "out")
    (vision / "model.safetensors").write_bytes(
        (save_base(tmp_path / "base") / "model.safetensors").read_bytes()
    )
    assert "not a causal LM" in refused(capsys, "convert", vision, tmp_path / "out")
    (vision / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    assert "not a causal LM" in refused(capsys, "convert", vision, tmp_path / "out")
    assert "is a file" in refused(capsys, "convert", vision / "config.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_corrupt_shards(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = base / "model.safetensors"
    whole = shard.read_bytes()
    for damaged in (b"", b"not a safetensors file", whole[: len(whole) // 2]):
        shard.write_bytes(damaged)
        assert "not a safetensors file" in refused(capsys, "convert", base, tmp_path / "out")
    shard.write_bytes(whole)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    assert "its config.json gives" in refused(capsys, "convert", base, tmp_path / "out")
    (base / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    assert "lacks a tensor for model.layers.4" in refused(
        capsys, "convert", base, tmp_path / "out", "--layers", "4"
    )
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(tmp_path / "base", max_shard_size="20KB")
    next(base.glob("*-of-*.safetensors")).unlink()
    assert "is missing" in refused(capsys, "convert", base, tmp_path / "out")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(family).save_pretrained(tmp_path / "base")
    assert "have routed experts alone" in refused(
        capsys, "convert", tmp_path / "base", tmp_path / "out", "--layers", "0,1"
    )


def test_twice(converted: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "converted already" in refused(capsys, "convert", converted, tmp_path / "out")
    before = bytes_of(converted)
    assert "--overwrite" in refused(capsys, "convert", base, converted, *TINY)
    assert bytes_of(converted) == before
    assert (
        cli.main(["convert", str(base), str(converted), "--layers", "1", "--no-verify", "--overwrite"]) == 0
    )
    assert "layers.1.mlp" in (converted / "model.safetensors.index.json").read_text()
    assert not list(tmp_path.glob(".*partial*"))


def test_a_full_disk_leaves_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("inplace_ttt.files.folders.save_file", no_space)
    assert "No space left on device" in refused(capsys, "convert", base, tmp_path / "out", *TINY)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base"]


def test_an_interruption_leaves_nothing(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("inplace_ttt.cli.convert.max_logit_difference", interrupt)
    assert cli.main(["convert", str(base), str(tmp_path / "out"), "--layers", "0"]) == 130
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base"]


def test_a_difference_from_the_base_is_exit_code_1(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inplace_ttt.cli.convert.max_logit_difference", lambda *_: 0.5)
    assert cli.main(["convert", str(base), str(tmp_path / "out"), "--layers", "0"]) == 1
    assert "differs from its base by 0.5" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_proof_sees_a_changed_weight(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares what was really written: a conversion that writes at once fails it, and one that
    damages a weight of the base."""
    from inplace_ttt.checkpoint import writing

    real, link = writing.initial_tensors, writing.link_or_copy

    def damaged(source: Path, target: Path) -> None:
        tensors = load_file(source)
        tensors["model.layers.1.self_attn.o_proj.weight"][0] += 1
        save_file(tensors, target, {"format": "pt"})

    monkeypatch.setattr(writing, "link_or_copy", damaged)
    assert cli.main(["convert", str(base), str(tmp_path / "out"), "--layers", "0", "--chunk-size", "4"]) == 1
    monkeypatch.setattr(writing, "link_or_copy", link)

    def with_writes(*args: Any) -> writing.LayerTensors:
        return {
            layer: {kind: tensor + 0.3 for kind, tensor in pair.items()}
            for layer, pair in real(*args).items()
        }

    monkeypatch.setattr("inplace_ttt.cli.convert.initial_tensors", with_writes)
    assert cli.main(["convert", str(base), str(tmp_path / "out"), "--layers", "0", "--chunk-size", "4"]) == 1


def test_a_chunk_longer_than_the_context_is_reported(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main(["convert", str(base), str(tmp_path / "out"), "--chunk-size", "777", "--no-verify"]) == 0
    assert "no write would ever be read" in caplog.text


@pytest.mark.full
def test_the_installed_command_answers_as_the_function_does(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("inplace-ttt")
    done = subprocess.run(
        [command, "convert", tmp_path / "nothing", tmp_path / "out", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("inplace-ttt convert: ")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout) == {
        "error": done.stderr.removeprefix("inplace-ttt convert: ").rstrip("\n"),
        "exit_code": 2,
    }

"""What the verbs print: the JSON contract, the options that exist, help for each."""

import json
import re
from pathlib import Path

import pytest
import tiny
from checkpoint.folders import save_base

from inplace_ttt import cli
from inplace_ttt.attention_window import SINKS
from inplace_ttt.audit.item import PROFILES
from inplace_ttt.calibration.calibrate import CALIBRATION_TOKENS
from inplace_ttt.cli.options.evaluate import BLOCK, DISTANCES
from inplace_ttt.tasks.passages import Passage

OPTIONS = {
    "convert": (
        "--adapter-only --calibrate --calibrate-tokens --chunk-size --device --eta --help --json --layers "
        "--no-verify --overwrite --preset --push --set --target --text-field"
    ),
    "info": "--base --help --json",
    "generate": (
        "--base --dtype --fast-weights-only --help --json --load-state --max-new-tokens --prompt-file "
        "--readings "
        "--save-state --seed --temperature --ttt"
    ),
    "chat": "--api-key --base --dtype --help --json --max-new-tokens --memory --port --read --session --sessions "
    "--system --temperature --ttt --web",
    "serve": "--api-key --help --host --json --memories --memory-bytes --per-key --port --vllm",
    "plan": "--device-memory --help --json --set",
    "train": "--from-scratch --help --json --no-audit --num-processes --set",
    "audit": "--card --compare --format --help --json --out --profile --seed",
    "diagnose": "--base --dtype --help --json --learning-rate --out --overwrite --text --text-field --tokens --train",
    "evaluate": (
        "--base --batch-size --block --cache --card --chat --contexts --distances --documents --dtype --facts "
        "--help --json --lengths --out --overwrite --passage --qa --rates --repeated-passage --rivals --samples "
        "--seed --sinks --skip --tasks --text --text-field --tokens --window --write-samples"
    ),
    "export": "--base --format --help --json --overwrite --push --rank --session --text",
    "import-reference": "--help --json --overwrite",
    "bench": (
        "--base --chunk-size --d --device --dtype --h --help --json --new-tokens --prompt-tokens --repeats "
        "--requests --serving --tokens"
    ),
}


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_is_the_frozen_surface(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert sorted(set(re.findall(r"--[a-z][a-z-]*", text.partition("example")[0]))) == OPTIONS[verb].split()
    assert f"inplace-ttt {verb} " in text or verb == "bench", "an example"


def test_help_names_the_defaults_that_the_verbs_use(capsys: pytest.CaptureFixture[str]) -> None:
    """The options import no torch, so that they write down what slower modules define."""
    *others, last = PROFILES
    passage, distances = f"{Passage().length},{Passage().gap}", ",".join(map(str, DISTANCES))
    expected = {
        "convert": [f"(default: {CALIBRATION_TOKENS})"],
        "audit": [f"{', '.join(others)} or {last}"],
        "evaluate": [f"(default: {value})" for value in (SINKS, BLOCK, passage, distances)],
    }
    for verb, defaults in expected.items():
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert [default for default in defaults if default not in text] == []


def test_top_level_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as stop:
            cli.main([flag])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in cli.VERBS)


def test_convert_and_info_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(tmp_path / "base")
    capsys.readouterr()
    assert (
        cli.main(
            [
                "convert",
                str(base),
                str(tmp_path / "out"),
                "--layers",
                "every:2",
                "--chunk-size",
                "8",
                "--eta",
                "0.5",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["output"] == str(tmp_path / "out")
    assert result["layers"] == [0, 2]
    assert result["config"]["eta"] == 0.5
    assert cli.main(["info", str(tmp_path / "out"), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["layers"] == [0, 2]
    assert info["config"] == result["config"]
    assert info["state_bytes_per_sequence"] == 2 * 32 * 48 * 4
    assert info["new_parameters"] == result["new_parameters"]
    assert cli.main(["info", str(tmp_path / "out")]) == 0
    assert "layers           0, 2" in capsys.readouterr().out


def test_info_of_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(tmp_path / "base", "gpt2")
    cli.main(
        ["convert", str(base), str(tmp_path / "adapter"), "--layers", "1", "--adapter-only", "--no-verify"]
    )
    capsys.readouterr()
    assert cli.main(["info", str(tmp_path / "adapter"), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["form"], info["layers"], info["state_bytes_per_sequence"]) == ("adapter", [1], 32 * 48 * 4)


@pytest.mark.full
def test_bench_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--d", "32", "--h", "64", "--tokens", "64", "--chunk-size", "16", "--repeats", "2"]
    assert cli.main(["bench", *sizes, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == [
        "linear",
        "fast_weight",
        "materializing",
        "additive",
        "least squares",
    ]
    assert rows[0]["ratio_to_linear"]["median"] == rows[0]["forward_ratio_to_linear"]["median"] == 1.0
    assert cli.main(["bench", *sizes]) == 0
    assert "limit 2.33" in capsys.readouterr().out


@pytest.mark.parametrize("chunk", [64, 600])
@pytest.mark.sample(1)
def test_layers_and_eta_are_chosen_for_chunks_of_any_size(
    chunk: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, text = tiny.save_base(tmp_path / "base", positions=16384), tmp_path / "text.txt"
    text.write_text(" ".join(str(number * number) for number in range(6000)))
    options = ["--preset", "gradient", "--chunk-size", str(chunk), "--calibrate", str(text)]
    assert cli.main(["convert", str(base), str(tmp_path / "out"), *options]) == 0
    assert "choice of layers and eta, on minus off in nats per token:" in capsys.readouterr().out

"""A conversion without a convolution goes wherever others go: folders, adapters, optimizer groups,
calibration, diagnosis."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoint.folders import save_base, tensors_of
from models import converted, distance, logits, random_ids
from safetensors.torch import load_file

from inplace_ttt import InPlaceTTTError, cli, load
from inplace_ttt.audit.auditor import audit_model
from inplace_ttt.diagnostics import diagnose
from inplace_ttt.diagnostics.report import write_report
from inplace_ttt.surgery import config_of, fast_weights
from inplace_ttt.training.loop.guards import FirstStep, GradientTap
from inplace_ttt.training.loop.parameters import parameter_groups
from inplace_ttt.training.recipe.training_section import Training

NORMS: dict[str, Any] = {
    "conv": "next",
    "target": "hidden_states",
    "write_norm": "spectral",
    "preserve_row_norms": True,
    "eta": 0.2,
}
SETTINGS = [
    x for name, value in NORMS.items() if name != "eta" for x in ("--set", f"{name}={json.dumps(value)}")
]


def test_folders_and_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_base(tmp_path / "base")
    arguments = ["--layers", "0,2", "--chunk-size", "7", "--eta", "0.2", *SETTINGS]
    assert cli.main(["convert", str(base), str(tmp_path / "full"), *arguments]) == 0
    assert "already writes" in capsys.readouterr().out
    model, ids = load(tmp_path / "full"), random_ids(1, 40)
    assert {name: getattr(config_of(model), name) for name in NORMS} == NORMS
    assert sorted(n for n in tensors_of(tmp_path / "full") if "ttt" in n) == [
        f"model.layers.{i}.mlp.down_proj.ttt.proj" for i in (0, 2)
    ]
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), expected)
    assert cli.main(["export", str(tmp_path / "full"), str(tmp_path / "adapter"), "--format", "adapter"]) == 0
    assert sorted(load_file(tmp_path / "adapter" / "inplace_ttt.safetensors")) == ["0.proj", "2.proj"]
    assert torch.equal(logits(load(tmp_path / "adapter"), ids), expected)
    capsys.readouterr()
    assert cli.main(["info", str(tmp_path / "full")]) == 0
    said = capsys.readouterr().out
    assert (
        "hidden_states, the next token's" in said
        and "conv next, write_norm spectral, preserve_row_norms True" in said
    )
    assert "new parameters   2,048" in said


def test_the_optimizer_and_the_first_step_know_p_alone() -> None:
    model, ids = converted("llama", **NORMS).train(), random_ids(2, 30)
    names = [group["name"] for group in parameter_groups(model, Training(steps=1))]
    assert "proj" in names and "conv" not in names
    with pytest.raises(InPlaceTTTError, match="conv_learning_rate does nothing"):
        parameter_groups(model, Training(steps=1, conv_learning_rate=1e-3))
    tap, warnings = GradientTap(model), []
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    class Done:
        global_step = 1

    FirstStep(tap, warnings).on_step_end(None, Done, None, model=model)
    assert warnings == [] and all(norms["proj"] > 0 for norms in tap.read().values())


def test_p_is_calibrated_on_a_text() -> None:
    model = converted("llama", writes=False, conv="next", proj_init="calibrated", eta=1e-3)
    assert all(layer.ttt.proj.any() for layer in fast_weights(model).values())
    as_convolution = converted("llama", writes=False, proj_init="calibrated")
    for a, b in zip(fast_weights(model).values(), fast_weights(as_convolution).values(), strict=True):
        assert distance(a.ttt.proj, b.ttt.proj) < 1e-6


@pytest.mark.full
def test_it_is_diagnosed(tmp_path: Path) -> None:
    model = converted("llama", **NORMS)
    found = diagnose(model, {"input_ids": random_ids(2, 50)})
    values = found.to_dict()
    assert values["groups"]["conv"]["parameter"] is None and values["groups"]["proj"]["gradient"] > 0
    assert all(
        "conv" not in layer["parameters"] and layer["writes"]["clipped"] == 0 for layer in values["layers"]
    )
    assert "init" not in values["advisor"] and "eta" in values["advisor"]
    assert write_report(found, tmp_path / "report")
    with torch.no_grad():
        for layer in fast_weights(model).values():
            layer.ttt.proj.zero_()
    after = diagnose(model, {"input_ids": random_ids(2, 50)})
    assert not any(finding.id == "zero-times-zero" for finding in after.findings), "P alone learns from zero"


def test_what_a_chunk_changes_of_the_weight_is_what_diagnosis_reports() -> None:
    """Rows keep their norms, so that no write moves a row by more than its diameter."""
    model = converted("llama", **{**NORMS, "eta": 1e4})
    found = diagnose(model, {"input_ids": random_ids(1, 50)}).measured
    assert all(0.5 < writes.state_ratio < 2.0 for writes in found.writes.values())


def test_commands_write_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, prompt = tmp_path / "ttt", tmp_path / "prompt.txt"
    base = tiny.save_base(tmp_path / "base")
    prompt.write_text(tiny.text(60))
    preset = ["--preset", "ttt_ntp", "--layers", "0", "--chunk-size", "16"]
    assert (
        cli.main(
            [
                "convert",
                str(base),
                str(folder),
                *preset,
                "--set",
                "prompt_write.cap=0.5",
                "--set",
                "prompt_write.eta=1",
            ]
        )
        == 0
    )
    whole, read, then = (["generate", str(folder), "--max-new-tokens", n, "--json"] for n in ("8", "0", "8"))
    capsys.readouterr()
    assert cli.main([*whole, "--prompt-file", str(prompt)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["prompt_written"] and result["chunks_written"] == 1 and result["state_bytes"] == 32 * 64 * 4
    assert cli.main([*read, "--prompt-file", str(prompt), "--save-state", str(tmp_path / "s")]) == 0
    (tmp_path / "more.txt").write_text(" and the sea")
    capsys.readouterr()
    assert (
        cli.main([*then, "--prompt-file", str(tmp_path / "more.txt"), "--load-state", str(tmp_path / "s")])
        == 0
    )
    later = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not later["prompt_written"] and later["state_bytes"] == result["state_bytes"]
    assert cli.main([*whole[:-1], "--prompt-file", str(prompt)]) == 0
    assert "wrote the prompt into the fast weights" in capsys.readouterr().err
    assert cli.main(["evaluate", str(folder), "--text", str(prompt), "--json"]) == 0
    said = capsys.readouterr()
    assert "the writes of its chunks are measured instead" in said.err
    assert json.loads(said.out.splitlines()[-1])["difference"]["mean"] != 0


@pytest.mark.parametrize(
    "options", [NORMS, {"write_norm": "spectral"}, {"preserve_row_norms": True}], ids=str
)
@pytest.mark.full
def test_the_audit_holds_it_against_what_it_declares(options: dict[str, Any]) -> None:
    """No probe of a layer drives it; whole readings decide."""
    report = audit_model(converted("llama", **options))
    held = (
        "declared-rule",
        "in-training",
        "gradient",
        "in-pieces",
        "in-batches",
        "over-many-chunks",
        "precisions",
        "through-a-file",
    )
    assert {id: report[id].verdict for id in held} == dict.fromkeys(held, "conforms")
    assert (
        report["own-chunk-exposure"].verdict == "not checked"
        and "declared-rule" in report["own-chunk-exposure"].outcome.found
    )
    assert set(report.undeclared) <= {"target-source", "chunk-size", "layer-spacing", "start-conv"}

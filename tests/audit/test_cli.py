"""`inplace-ttt audit`: exit codes, forms, declarations of a checkpoint, and one line for bad input."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint.folders import save_base
from safetensors.torch import load_file, save_file

from inplace_ttt import cli

SHORT = ["--chunk-size", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, paper (nothing to declare), short (chunks of 64) and reference, all of a model with 7 layers."""
    folder = tmp_path_factory.mktemp("audit")
    base = save_base(folder / "base", num_hidden_layers=7, max_position_embeddings=65536)
    for name, settings in {"paper": [], "short": SHORT, "reference": ["--preset", "reference"]}.items():
        assert cli.main(["convert", str(base), str(folder / name), "--no-verify", *settings]) == 0
    return folder


def audit(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["audit", *map(str, arguments)])
    return code, capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["audit", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "item/s" not in line and line.strip()]
    assert out == "" and len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def edit_config(path: Path, change: Any) -> None:
    values = json.loads((path / "config.json").read_text())
    change(values)
    (path / "config.json").write_text(json.dumps(values))


def copy_of(path: Path, to: Path) -> Path:
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.full
def test_a_paper_conversion_has_no_deviation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = audit(capsys, folder / "paper", "--json")
    values = json.loads(out)
    assert code == 0 and values["undeclared"] == [] and values["profile"] == "paper"
    assert values["items"][0].keys() >= {
        "id",
        "title",
        "paper_ref",
        "expected",
        "found",
        "evidence",
        "verdict",
    }


@pytest.mark.full
def test_a_reference_conversion_has_the_known_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = audit(capsys, folder / "reference", "--json")
    assert code == 1 and json.loads(out)["undeclared"] == ["chunk-size", "target-source"]
    code, out = audit(capsys, folder / "reference", "--profile", "reference", "--json")
    assert code == 0 and json.loads(out)["undeclared"] == []


@pytest.mark.full
def test_an_adapter_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(folder / "paper"), str(tmp_path / "adapter"), "--format", "adapter"]) == 0
    assert audit(capsys, tmp_path / "adapter", "--json")[0] == 0


@pytest.mark.full
def test_a_checkpoint_declares(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(capsys, folder / "short")[0] == 1
    declared = copy_of(folder / "short", tmp_path / "declared")
    both = [{"id": "chunk-size", "why": "short texts"}, {"id": "sign", "why": "mended"}]
    edit_config(declared, lambda values: values["inplace_ttt"].update(declared_deviations=both))
    code, out = audit(capsys, declared, "--json")
    values = json.loads(out)
    assert code == 0 and [d["id"] for d in values["stale_declarations"]] == ["sign"]
    assert next(item for item in values["items"] if item["id"] == "chunk-size")["declared"] == "short texts"
    edit_config(
        declared, lambda values: values["inplace_ttt"].update(declared_deviations=[{"id": "chunk-size"}])
    )
    assert "a declared deviation is {id, why}" in refused(capsys, declared)
    edit_config(declared, lambda values: values["inplace_ttt"].update(declared_deviations="chunk-size"))
    assert "must be a list" in refused(capsys, declared)


_NUMBERS = re.compile(r"[-+]?\d[\d.,e+-]*")


@pytest.mark.parametrize(
    ("form", "start"), [("md", "# In-Place TTT audit"), ("html", "<!DOCTYPE html>"), ("json", "{")]
)
@pytest.mark.full
def test_forms_and_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, start: str
) -> None:
    code, out = audit(capsys, folder / "short", "--format", form, "--compare", folder / "reference")
    assert code == 1 and out.startswith(start)
    assert "hidden states" in out, "the comparison names what the other has"
    code, said = audit(
        capsys,
        folder / "short",
        "--format",
        form,
        "--compare",
        folder / "reference",
        "--out",
        tmp_path / "report",
    )
    assert code == 1 and "undeclared deviations: chunk-size" in said
    written = (tmp_path / "report").read_text()
    assert written.startswith(start)
    assert re.sub(_NUMBERS, "", written) == re.sub(_NUMBERS, "", out), (
        "errors of the order of rounding differ, and nothing else"
    )


def test_bad_input_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a converted checkpoint" in refused(capsys, folder / "base")
    assert "does not exist" in refused(capsys, tmp_path / "nowhere" / "else")
    assert "profile 'papre' does not exist" in refused(capsys, folder / "paper", "--profile", "papre")
    assert "--format must be one of" in refused(capsys, folder / "paper", "--format", "pdf")
    assert "a folder that does not exist" in refused(
        capsys, folder / "paper", "--out", tmp_path / "no" / "report"
    )
    assert refused(capsys, folder / "paper", "--seed", "x")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused(capsys, empty)


def test_half_a_checkpoint_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = copy_of(folder / "paper", tmp_path / "half")
    tensors = load_file(half / "inplace_ttt.safetensors")
    lost = sorted(tensors)[0]
    save_file({name: t for name, t in tensors.items() if name != lost}, half / "inplace_ttt.safetensors")
    assert "lacks" in refused(capsys, half)
    index = json.loads((half / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (half / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has the TTT tensors proj, but its config requires conv, proj" in refused(capsys, half)


def test_a_recipe_with_a_typo_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(yaml.safe_dump({"model": {"path": "x"}, "dta": {}}))
    assert "dta" in refused(capsys, recipe)
    assert "nowhere.yaml" in refused(capsys, tmp_path / "nowhere.yaml")

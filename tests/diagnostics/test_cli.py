"""`inplace-ttt diagnose`: the contract's JSON, the folder it writes, and one line for bad input."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoint.folders import bytes_of, save_base
from models import RIDGE
from safetensors.torch import load_file, save_file
from training.runs import CHUNK, checkpoint

from inplace_ttt import cli
from inplace_ttt.files.manifest import MANIFEST
from inplace_ttt.reports import charts
from inplace_ttt.texts.documents import documents_in, tokens_of

PLOTS = {
    "gradients.png",
    "chunks.png",
    "writes.png",
    "effects.png",
    "keys.png",
    "sweeps.png",
    "precision.png",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted, conv and P on, chunks of 16, a tokenizer of words."""
    return checkpoint(tmp_path_factory.mktemp("diagnose") / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(" ".join(f"t{3 + 7 * i % 94}" for i in range(300)))
    return tmp_path / "text.txt"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["diagnose", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["diagnose", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("inplace-ttt")]
    assert out == "" and len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


def test_what_it_writes_and_says(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    values = json.loads(run(capsys, model, "--text", text, "--out", out, "--json"))
    assert values.keys() >= {"groups", "layers", "findings", "output", "summary"}
    assert values["groups"].keys() == {"conv", "proj", "weight", "embeddings"} and [
        e["layer"] for e in values["layers"]
    ] == [0, 2]
    assert all(f.keys() >= {"id", "severity", "message", "remedy"} for f in values["findings"])
    assert not [f for f in values["findings"] if f["severity"] == "severe"]
    assert {file.name for file in out.iterdir()} == {MANIFEST, "report.html", "diagnose.json", *PLOTS}
    written = json.loads((out / "diagnose.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert written == {k: v for k, v in values.items() if k not in ("output", "summary")}
    assert not list(tmp_path.glob(".*partial*"))


def test_the_page_loads_nothing_and_holds_the_plots(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run(capsys, model, "--text", text, "--out", tmp_path / "out", "--learning-rate", "1e-3")
    assert said.startswith("Nothing severe") and said.rstrip().endswith(f"wrote {tmp_path}/out/report.html")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "http" not in re.sub(r"base64,[^\"]+", "", page)
    inlined = {base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", page)}
    assert inlined == {file.read_bytes() for file in (tmp_path / "out").glob("*.png")} and len(
        inlined
    ) == len(PLOTS)
    assert all(f"<th>{head}</th>" in page for head in ("‖gradient‖", "η‖S‖/‖W0‖", "loss on − off"))


@pytest.mark.full
def test_how_much_tokens_count(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a gate of writes, mean and spread of it; without, 1."""
    gated = checkpoint(tmp_path / "gated", RIDGE)
    for where, counts in ((gated, r"[01]\.\d+ ± 0\.\d+"), (model, "1")):
        out = tmp_path / f"out-{where.name}"
        run(capsys, where, "--text", text, "--out", out)
        layers = (out / "report.html").read_text().partition("<h2>Layers</h2>")[2]
        column = re.findall("<th>(.*?)</th>", layers).index("a token counts")
        rows = [re.findall("<td>(.*?)</td>", row)[column] for row in re.findall("<tr><td>.*?</tr>", layers)]
        assert len(rows) == 2 and all(re.fullmatch(counts, cell) for cell in rows)


def test_without_matplotlib_the_page_says_so(
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    run(capsys, model, "--text", text, "--out", tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {MANIFEST, "report.html", "diagnose.json"}
    assert "pip install -e" in (tmp_path / "out" / "report.html").read_text()


def test_a_fresh_conversion_and_its_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path, text: Path
) -> None:
    """Conv is zero: no picture of writes, and nothing severe."""
    base = save_base(tmp_path / "base")
    for file in model.glob("tokenizer*"):
        (base / file.name).write_bytes(file.read_bytes())
    for form in ([], ["--adapter-only"]):
        fresh, out = tmp_path / f"fresh{len(form)}", tmp_path / f"out{len(form)}"
        assert (
            cli.main(
                [
                    "convert",
                    str(base),
                    str(fresh),
                    "--layers",
                    "0,2",
                    "--chunk-size",
                    "16",
                    "--no-verify",
                    *form,
                ]
            )
            == 0
        )
        values = json.loads(run(capsys, fresh, "--text", text, "--out", out, "--json"))
        assert {f["id"] for f in values["findings"]} == {"zero-init", "safe-range"}
        assert {file.name for file in out.glob("*.png")} == {
            "gradients.png",
            "chunks.png",
            "keys.png",
            "sweeps.png",
        }


def test_a_sick_checkpoint(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conv and P zero on disk."""
    sick = tmp_path / "sick"
    sick.mkdir()
    for file in model.iterdir():
        (sick / file.name).write_bytes(file.read_bytes())
    (shard,) = sick.glob("*.safetensors")
    save_file(
        {n: t.zero_() if ".ttt." in n else t for n, t in load_file(shard).items()}, shard, {"format": "pt"}
    )
    said = run(capsys, sick, "--text", text, "--out", tmp_path / "out")
    assert "severe   zero-times-zero: layers 0 and 2: conv and P are both zero" in said
    assert "Severe" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.full
def test_only_conv_and_p_are_trained(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(
        run(capsys, model, "--text", text, "--out", tmp_path / "out", "--train", "ttt", "--json")
    )
    assert {name: group["trained"] for name, group in values["groups"].items()} == {
        "conv": True,
        "proj": True,
        "weight": False,
        "embeddings": False,
    }
    assert values["groups"]["weight"]["gradient"] > 0, "measured all the same, to compare with"


def test_bad_input_is_one_line(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "empty": b"",
        "blank": b" \n ",
        "short": b"t5 " * (CHUNK + 1),
        "latin": "t5 ü".encode("latin-1") * 40,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    base, out = save_base(tmp_path / "base"), tmp_path / "out"
    (tmp_path / "exists").mkdir()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for file in model.iterdir():
        (foreign / file.name).write_bytes(file.read_bytes())
    words = json.loads((foreign / "tokenizer.json").read_text())
    words["model"]["vocab"]["t5"] = 5000
    (foreign / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "fives").write_text("t5 " * 100)
    before = bytes_of(tmp_path)
    cases: list[tuple[list[Any], str]] = [
        ([model, "--text", tmp_path / "empty", "--out", out], "holds no text"),
        ([model, "--text", tmp_path / "blank", "--out", out], "holds no text"),
        (
            [model, "--text", tmp_path / "short", "--out", out],
            "has 17 tokens, so with chunks of 16 no prediction reads a write",
        ),
        (
            [model, "--text", text, "--out", out, "--tokens", "9"],
            "has 9 tokens (--tokens 9), so with chunks of 16 no prediction",
        ),
        ([model, "--text", tmp_path / "latin", "--out", out], "give a UTF-8 text file"),
        ([model, "--text", tmp_path / "nowhere", "--out", out], "does not exist"),
        (
            [foreign, "--text", tmp_path / "fives", "--out", out],
            "has the tokenizer of another model: it gives ids up to 5000, but the model has 97",
        ),
        ([base, "--text", text, "--out", out], "is not a converted checkpoint"),
        ([tmp_path / "no" / "model", "--text", text, "--out", out], "does not exist"),
        ([model, "--text", text, "--out", tmp_path / "exists"], "exists already"),
        ([model, "--text", text, "--out", "/proc/nowhere/out"], "cannot write"),
        ([model, "--text", text, "--out", out, "--tokens", "0"], "--tokens must be at least 1"),
        ([model, "--text", text, "--out", out, "--learning-rate", "-1"], "--learning-rate must be above 0"),
        ([model, "--text", text, "--out", out, "--dtype", "float33"], "is not a dtype of weights"),
        ([model, "--text", text], "required: --out"),
    ]
    for arguments, message in cases:
        assert message in refused(capsys, *arguments), arguments
        assert bytes_of(tmp_path) == before, arguments


@pytest.mark.full
def test_a_folder_is_replaced_when_asked(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, model, "--text", text, "--out", tmp_path / "out")
    before = (tmp_path / "out").stat().st_ino
    run(capsys, model, "--text", text, "--out", tmp_path / "out", "--overwrite")
    assert (tmp_path / "out").stat().st_ino != before


class _Bytes:
    """A tokenizer of one token a word, that counts the characters it is given."""

    seen = 0

    def __call__(self, text: str, **kwargs: Any) -> Any:
        self.seen += len(text)
        return type("Encoding", (), {"input_ids": [len(word) for word in text.split()]})


@pytest.mark.parametrize("word", ["a", "ü€" * 40])
def test_a_long_text_is_read_no_further_than_needed(word: str, tmp_path: Path) -> None:
    """A million words: the first 100 tokens are those of the whole text, from a small part of it; characters
    are never cut."""
    (tmp_path / "long").write_text(" ".join([word] * 1_000_000) if word == "a" else " ".join([word] * 20_000))
    tokenizer = _Bytes()
    ids = tokens_of(*documents_in([tmp_path / "long"]), tokenizer, 100)
    assert ids.tolist() == [[len(word)] * 100]
    assert tokenizer.seen < 40_000

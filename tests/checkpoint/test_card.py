"""Model cards: written with every checkpoint, handed on from one to the next, and pushed with it to a hub."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import ModelCard
from tiny import word_level
from training.runs import checkpoint, documents, recipe_file, trained

from inplace_ttt import InPlaceTTTError, cli
from inplace_ttt.checkpoint.card import add_to_card, write_card

from .folders import save_base

WORDS = [f"t{i}" for i in range(3, 97)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base with a tokenizer and a card of its own."""
    folder = save_base(tmp_path / "base", vocab_size=97)
    word_level(WORDS).save_pretrained(folder)
    (folder / "README.md").write_text(
        "---\nlicense: gemma\nlanguage: [en]\nbase_model: someone/big\ntags: [theirs]\n---\n# Not ours\n"
    )
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return documents(tmp_path / "text", (90, 120))


def run(*line: object, code: int = 0) -> None:
    assert cli.main([str(word) for word in line]) == code


def facts(folder: Path) -> dict[str, Any]:
    """The facts in a card's front matter, which a reader of the hub's finds valid."""
    found: dict[str, Any] = ModelCard.load(folder / "README.md").data.to_dict()["inplace_ttt"]
    return found


def test_a_conversion_has_one(base: Path, tmp_path: Path) -> None:
    run("convert", base, tmp_path / "ttt", "--layers", "0,2", "--chunk-size", 7)
    card = ModelCard.load(tmp_path / "ttt" / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["language"], data["base_model"]) == ("gemma", ["en"], "someone/big")
    assert data["inplace_ttt"]["config"]["layers"] == [0, 2] and "theirs" not in data["tags"]
    wanted = (
        "layers 0, 2",
        "| chunk | 7 tokens |",
        "gemma, the base's",
        "a fresh conversion writes nothing",
        "Not measured",
        'load("ttt")',
    )
    for said in wanted:
        assert said in card.text, said


@pytest.mark.full
def test_what_is_known_is_handed_on(base: Path, text: Path, tmp_path: Path) -> None:
    """From a calibrated conversion, evaluated and audited, to an adapter and back."""
    ttt, files = tmp_path / "ttt", sorted(text.glob("*.txt"))
    settings = ("--layers", "0,2", "--chunk-size", 7, "--set", "whitening.rank=16")
    run("convert", base, ttt, "--preset", "ridge", *settings, "--calibrate", *files)
    run("evaluate", ttt, "--text", *files, "--card")
    run("audit", ttt, "--card", code=1)
    known = facts(ttt)
    assert known["calibration"]["files"] == ["00.txt", "01.txt"] and known["calibration"]["tokens"] == 210
    # nothing is written yet
    assert known["evaluation"]["documents"] == 2 and known["evaluation"]["difference"]["mean"] == 0
    assert known["audit"]["undeclared"] == ["chunk-size", "layer-spacing"]
    run("export", ttt, tmp_path / "adapter", "--format", "adapter")
    run("export", tmp_path / "adapter", tmp_path / "again", "--format", "full")
    for folder, form in ((tmp_path / "adapter", "adapter"), (tmp_path / "again", "full")):
        assert facts(folder) == {**known, "form": form}
    card = ModelCard.load(tmp_path / "again" / "README.md").text
    assert (
        "210 tokens of `00.txt`, `01.txt`" in card
        and "| on - off | " in card
        and "undeclared deviations: " in card
    )
    # a card of ours may be replaced
    run("export", ttt, tmp_path / "again", "--format", "adapter", "--overwrite")


def test_a_trained_one_says_by_what(tmp_path: Path) -> None:
    """The run's rows, its evaluation and its audit; what is known of the conversion stays."""
    model = checkpoint(tmp_path / "model")
    of_other_weights = {"audit": {"profile": "paper", "undeclared": [], "declared": []}}
    calibration = {"files": ["a.txt"], "tokens": 3, "sha256": "0"}
    write_card(
        model,
        None,
        _config(model),
        {"name_or_path": "owner/base"},
        "full",
        calibration=calibration,
        **of_other_weights,
    )
    recipe = recipe_file(
        tmp_path, model, documents(tmp_path / "text"), audit={"profile": "paper"}, data={"validation_documents": 2},
    )  # fmt: skip
    report, _ = trained(recipe, flags=("--no-audit",))
    final = Path(report["output"])
    known = facts(final)
    assert (
        known["training"]["sha256"] == report["data"]["sha256"]
        and known["training"]["steps"] == report["steps"] == 3
    )
    assert known["training"]["sources"] == ["text"] and known["training"]["tokens_a_step"] == 256
    assert known["evaluation"]["on"] == report["evaluation"]["eval_loss"]
    assert ModelCard.load(final / "README.md").data.base_model == "owner/base"
    assert known["calibration"] == calibration and "audit" not in known  # which was of the weights before


def _config(folder: Path) -> Any:
    from inplace_ttt.checkpoint.reading import Checkpoint

    return Checkpoint.open(folder).ttt_config


def test_somebodys_own_readme_is_left(base: Path, tmp_path: Path) -> None:
    run("convert", base, tmp_path / "ttt", "--layers", "0")
    (tmp_path / "ttt" / "README.md").write_text("# Mine\n")
    with pytest.raises(InPlaceTTTError, match="lacks a model card of inplace-ttt"):
        add_to_card(tmp_path / "ttt", audit={})
    run("evaluate", tmp_path / "ttt", "--text", base / "config.json", "--card", code=2)
    run("convert", base, tmp_path / "ttt", "--layers", "0", "--overwrite", code=2)
    assert (tmp_path / "ttt" / "README.md").read_text() == "# Mine\n"


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as takes small files in a commit."""

    commits: ClassVar[list[dict[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_good":
            return self.answer({"error": "no such token"}, 401)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"http://{self.headers['Host']}/me/{json.loads(body)['name']}"})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if self.path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        values = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
        self.commits.append({value["path"]: base64.b64decode(value["content"]) for value in values})
        return self.answer(
            {
                "success": True,
                "commitOid": "c0ffee",
                "commitUrl": f"http://{self.headers['Host']}/me/mine/commit/c0ffee",
            }
        )

    def do_GET(self) -> None:
        self.answer({"id": "me/mine", "sha": "0" * 40, "siblings": []})

    def answer(self, values: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.commits.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("token", "offline", "code"), [("hf_good", "0", 0), ("hf_bad", "0", 2), ("", "0", 2), ("hf_good", "1", 2)]
)
@pytest.mark.sample(1)
def test_push(base: Path, tmp_path: Path, hub: str, token: str, offline: str, code: int) -> None:
    """By huggingface_hub to a server that answers as a hub does; who has no token is told before anything is
    written."""
    known = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": token,
    }
    line = [
        sys.executable,
        "-m",
        "inplace_ttt.cli",
        "convert",
        str(base),
        str(tmp_path / "ttt"),
        "--layers",
        "0",
        "--push",
        "mine",
        "--json",
    ]
    done = subprocess.run(line, env=known, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr[-2000:]
    if code:
        assert "error" in json.loads(done.stdout) and not Hub.commits
        assert (tmp_path / "ttt").exists() == (token == "hf_bad")
        return
    assert json.loads(done.stdout)["pushed"] == f"{hub}/me/mine"
    (commit,) = Hub.commits
    assert commit.keys() == {file.name for file in (tmp_path / "ttt").iterdir()}
    assert commit["README.md"] == (tmp_path / "ttt" / "README.md").read_bytes()

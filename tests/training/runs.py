"""Real runs through the launcher: a tiny converted checkpoint, text files, and what a run leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from models import turn_writer_on
from safetensors.torch import load_file
from tiny import word_level
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from inplace_ttt import InPlaceTTTConfig, convert

from .recipes import CONFIG

CHUNK, ROW = 16, 128
LENGTHS = (70, 33, 150, 12, 300, 64, 5, 41, 128, 90, 17, 200, 256, 99)


def checkpoint(folder: Path, **config: Any) -> Path:
    """A converted tiny model with its writer on, and a tokenizer of words t3 … t96."""
    torch.manual_seed(0)
    model = convert(MistralForCausalLM(MistralConfig(**{**CONFIG, **config})), InPlaceTTTConfig(layers=(0, 2), chunk_size=CHUNK))
    turn_writer_on(model)
    model.save_pretrained(folder)
    word_level(f"t{i}" for i in range(3, CONFIG["vocab_size"])).save_pretrained(folder)
    return folder


def documents(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Path:
    """One text file a document."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    for number, length in enumerate(lengths):
        ids = torch.randint(3, CONFIG["vocab_size"], (length,), generator=generator).tolist()
        (folder / f"{number:02}.txt").write_text(" ".join(f"t{i}" for i in ids))
    return folder


def recipe_file(folder: Path, model: Path, text: Path, **sections: Any) -> Path:
    """A recipe for them; a section's values are put over the ones here."""
    values: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(text), "sequence_length": ROW, "cache": str(folder / "cache")},
        "optimisation": {"steps": 3, "learning_rate": 1e-3, "epsilon": 1e-3, "accumulation": 2, "schedule": "linear", "warmup_steps": 1},
        "monitor": {"log_every": 1, "save_every": 100},
        "audit": {"profile": None},
        "deepspeed": 1,
        "output": str(folder / "out"),
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def start(file: Path, *settings: str, flags: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    """`inplace-ttt train FILE --set …`, in a session of its own."""
    command = [sys.executable, "-m", "inplace_ttt.cli", "train", str(file), "--json", *flags]
    for setting in settings:
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes, **options)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[dict[str, Any], str]:
    """The report on stdout and what went to stderr."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err[-3000:]
    return json.loads(out), err


def logged(output: Path, key: str) -> list[float]:
    """A value of every step's line of the log."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}

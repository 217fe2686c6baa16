"""Real runs: a tiny converted checkpoint, text files, and what a run leaves."""

import functools
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from models import random_ids, turn_writer_on
from safetensors.torch import load_file
from tiny import word_level
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from inplace_ttt import InPlaceTTTConfig, calibrate, convert
from inplace_ttt.training.__main__ import main
from inplace_ttt.training.recipe.recipe import load_recipe

from .forked import Forked
from .recipes import CONFIG

CHUNK, ROW = 16, 128
LENGTHS = (70, 33, 150, 12, 300, 64, 5, 41, 128, 90, 17, 200, 256, 99)


def checkpoint(folder: Path, ttt: Mapping[str, Any] | None = None, **config: Any) -> Path:
    """A converted tiny model with its writer on, and a tokenizer of words t3 … t96."""
    torch.manual_seed(0)
    surgery = InPlaceTTTConfig(layers=(0, 2), chunk_size=CHUNK, **(ttt or {}))
    model = convert(MistralForCausalLM(MistralConfig(**{**CONFIG, **config})), surgery)
    if surgery.needs_calibration:
        calibrate(model, [random_ids(1, 64, seed=2)])
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
        "training": {
            "steps": 3,
            "learning_rate": 1e-3,
            "epsilon": 1e-3,
            "gradient_accumulation_steps": 2,
            "lr_scheduler": "linear",
            "warmup_steps": 1,
        },
        "monitor": {"logging_steps": 1, "save_steps": 100},
        "audit": {"enabled": False},
        "deepspeed": 1,
        "output": str(folder / "out"),
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def start(file: Path, *settings: str, flags: tuple[str, ...] = (), largest_file: int | None = None) -> Forked:
    """The processes of a run as DeepSpeed's launcher would start them, with `--set` for each of the
    settings."""
    world = load_recipe(file, settings).parallel.world
    return Forked(
        functools.partial(one_process, [str(file), *flags, *_set(settings)]),
        environments(world),
        largest_file,
    )


def environments(world: int) -> list[dict[str, str]]:
    """What a launcher tells each of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def one_process(arguments: list[str]) -> int:
    """`python -m inplace_ttt.training` with these arguments."""
    sys.argv[1:] = arguments
    return main()


def finish(run: Forked, code: int = 0) -> str:
    """The log of a run that ends with this exit code."""
    found, log = run.wait()
    assert found == code, log[-3000:]
    return log


def trained(file: Path, *settings: str, **options: Any) -> tuple[dict[str, Any], str]:
    """Run a recipe to its end: its report, and the log."""
    log = finish(start(file, *settings, **options))
    return json.loads((Path(load_recipe(file, settings).output) / "train_report.json").read_text()), log


def _set(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def logged(output: Path, key: str) -> list[float]:
    """A value of every step's line of the log."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }

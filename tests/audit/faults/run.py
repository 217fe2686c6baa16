"""The training run that faults of data and optimization are planted in, and its scenes: its rows, and a few
of its steps."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models import turn_writer_on
from tiny import word_level
from torch import Tensor
from training.recipes import CONFIG, tiny_recipe
from transformers import AutoTokenizer

from inplace_ttt.audit import Report
from inplace_ttt.surgery import fast_weights
from inplace_ttt.training.audit import audit_recipe
from inplace_ttt.training.data import data
from inplace_ttt.training.loop import batches, parameters
from inplace_ttt.training.loop.guards import clip_finite
from inplace_ttt.training.loop.monitor import EtaWarmup
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.recipe import Recipe

from .world import Spoil

CHUNK, ROW, STEPS = 16, 128, 6
LENGTHS = (70, 33, 150, 12, 300, 64, 5, 41, 128, 90, 17, 200, 256, 99)
"""Of documents, in tokens: shorter than a chunk, and longer than a row."""


@dataclass(frozen=True)
class Run:
    """A tiny recipe over documents of random words. changes: settings put over it. lengths: of its
    documents."""

    changes: tuple[str, ...] = ()
    lengths: tuple[int, ...] = LENGTHS

    def audited(self, spoil: Spoil | None = None) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            return audit_recipe(self.recipe(Path(folder)))

    def recipe(self, folder: Path) -> Recipe:
        """The recipe, whose rows are cached in the folder."""
        source = _documents(self.lengths)
        return tiny_recipe(
            folder,
            *self.changes,
            model={
                "config": {**CONFIG, "num_hidden_layers": 7},
                "tokenizer": str(source.parent / "tokenizer"),
                "dtype": "float32",
            },
            ttt={"layers": "every:6", "chunk_size": CHUNK},
            data={"train": str(source), "sequence_length": ROW, "cache": str(folder / "cache")},
            training={"steps": STEPS, "learning_rate": 3e-4, "batch_size": 2},
        )


@functools.cache
def _documents(lengths: tuple[int, ...]) -> Path:
    """Texts of so many words, one file each, beside a tokenizer of these words."""
    folder = Path(_scratch().name) / str(abs(hash(lengths)))
    texts = folder / "texts"
    texts.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    for number, length in enumerate(lengths):
        ids = torch.randint(3, CONFIG["vocab_size"], (length,), generator=generator).tolist()
        (texts / f"{number:02}.txt").write_text(" ".join(f"t{i}" for i in ids))
    word_level(f"t{i}" for i in range(3, CONFIG["vocab_size"])).save_pretrained(folder / "tokenizer")
    return texts


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="audited-run-")


def rows_of(recipe: Recipe) -> list[dict[str, Any]]:
    """The rows that a recipe trains on."""
    return list(
        data.build_data(recipe, AutoTokenizer.from_pretrained(recipe.model.tokenizer_path), CHUNK).train
    )


def rows(world: Run, spoil: Spoil | None) -> dict[str, Tensor]:
    """Every number of every row."""
    with tempfile.TemporaryDirectory() as folder:
        found = rows_of(world.recipe(Path(folder)))
    return {name: torch.tensor([row[name] for row in found], dtype=torch.float64) for name in found[0]}


def steps(world: Run, spoil: Spoil | None) -> dict[str, Tensor]:
    """How far conv, P and the rest have come after the run's steps, as its own parts make them."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = world.recipe(Path(folder))
        found = rows_of(recipe)
    settings, model = recipe.training, build_model(recipe)
    turn_writer_on(model)
    model.train()
    groups = parameters.parameter_groups(model, settings)
    optimizer = torch.optim.AdamW(groups, betas=(settings.betas[0], settings.betas[1]), eps=1e-3)
    factors = [parameters.schedule(settings, recipe.steps, group["name"]) for group in groups]
    scheduler, warmup = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, factors),
        EtaWarmup(settings.eta_warmup_steps),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        warmup.on_step_begin(None, SimpleNamespace(global_step=step), None, model=model)
        batch = batches.collate([found[(2 * step + i) % len(found)] for i in range(2)])
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        clip_finite(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        scheduler.step()
    moved = {name: (p.detach() - before[name]).flatten() for name, p in model.named_parameters()}
    own = {
        f"{layer} {n}": f"model.layers.{layer}.mlp.down_proj.ttt.{n}"
        for layer in fast_weights(model)
        for n in ("conv", "proj")
    }
    rest = torch.cat([change for name, change in moved.items() if name not in own.values()])
    return {**{key: moved[name] for key, name in own.items()}, "the rest": rest}


RUN_SCENES: dict[str, Callable[[Run, Spoil | None], dict[str, Tensor]]] = {"rows": rows, "steps": steps}

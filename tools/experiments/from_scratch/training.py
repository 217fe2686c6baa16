"""Trains one system with one seed on the recipe's task, and makes the table of all runs."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from inplace_ttt.errors import InPlaceTTTError
from inplace_ttt.reports.statistics import Mean
from inplace_ttt.tasks import IGNORED

from .model import CausalModel, matching_width
from .settings import NONE, Scratch, Training
from .tasks import Task, task_of


def build(settings: Scratch, vocabulary: int, system: str, seed: int) -> CausalModel:
    """Returns the model of a system, with as many parameters as attention alone. All systems start with the
    same embeddings."""
    options = settings.systems.get(system) or {}
    width = matching_width(settings.model, vocabulary, system, options)
    torch.manual_seed(seed)
    return CausalModel(settings.model, vocabulary, width, system, options)


def train_one(settings: Scratch, task: Task, system: str, seed: int) -> dict[str, Any]:
    """Returns the figures of one run.

    Speed is per second of processor time, which other work on the machine hardly changes.
    """
    model, training = build(settings, task.vocabulary, system, seed), settings.training
    optimizer = torch.optim.Adam(model.parameters(), training.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, training))
    seconds, losses = 0.0, []
    with tqdm(range(training.steps), desc=f"{system}, seed {seed}", unit="step", disable=None) as bar:
        for step in bar:
            ids, labels = task.batch(seed, step)
            started = time.process_time()
            losses.append(learn(model, ids, labels, optimizer, training.max_grad_norm))
            scheduler.step()
            seconds += time.process_time() - started
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            if not math.isfinite(losses[-1]):
                raise InPlaceTTTError(
                    f"{system} diverged with seed {seed} at step {step}; lower training.learning_rate or "
                    "its own rates."
                )
    return {
        "system": system,
        "seed": seed,
        "scores": score(model, task, seed, training.batch_size),
        "train_loss": statistics.mean(losses[-10:]),
        "tokens_per_second": training.steps * training.batch_size * (training.length - 1) / seconds,
        "seconds": seconds,
        "parameters": model.parameter_count(),
        "state_bytes": model.memory_bytes(training.length - 1),
    }


def learn(
    model: nn.Module, ids: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer, max_grad_norm: float
) -> float:
    """Takes one step, and returns its loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return loss.item()


def factor(step: int, training: Training) -> float:
    """Returns the factor on the learning rate: linear from 0 over the warm-up, then a cosine to a tenth."""
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / max(training.steps - training.warmup_steps, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def score(model: nn.Module, task: Task, seed: int, batch_size: int) -> dict[str, float]:
    """Returns the task's figures on its held-out rows."""
    ids, labels = task.held_out(seed)
    losses, right = [], []
    for these, wanted in zip(ids.split(batch_size), labels.split(batch_size), strict=True):
        logits = model(these)
        losses.append(F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none"))
        right.append(logits.argmax(dim=-1) == wanted)
    return task.scores(torch.cat(losses), torch.cat(right), labels)


def prepare(settings: Scratch) -> tuple[Task, list[dict[str, Any]]]:
    """Returns the task, and every system's MLP width and parameters beside those of attention alone.

    A bad recipe is refused here, before anything is trained.
    """
    task = task_of(settings)
    aimed_at = build(settings, task.vocabulary, NONE, seed=0).parameter_count()
    lines = []
    for system in settings.systems:
        model = build(settings, task.vocabulary, system, seed=0)
        lines.append(
            {
                "system": system,
                "width": model.width,
                "parameters": model.parameter_count(),
                "parameters_of_attention": aimed_at,
            }
        )
    return task, lines


def table(rows: list[dict[str, Any]], settings: Scratch) -> list[dict[str, Any]]:
    """Returns one line per system: the mean of every score over the seeds, and its standard error."""
    lines = []
    for system in settings.systems:
        found = [row for row in rows if row["system"] == system]
        if not found:
            continue
        scores = {name: spread([row["scores"][name] for row in found]) for name in found[0]["scores"]}
        shared = {name: found[0][name] for name in ("parameters", "state_bytes")}
        speed = statistics.mean(row["tokens_per_second"] for row in found)
        lines.append(
            {"system": system, "n": len(found), "scores": scores, "tokens_per_second": speed, **shared}
        )
    return lines


def spread(values: list[float]) -> dict[str, float | None]:
    found = Mean.of(values, alone=math.nan)
    return {"mean": found.mean, "stderr": found.stderr}

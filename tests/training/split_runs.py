"""Runs of a recipe that must agree, however they are split, and the same run as a few lines of torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from inplace_ttt import load
from inplace_ttt.attention_window import set_attention_window
from inplace_ttt.surgery import disable_ttt
from inplace_ttt.tasks import IGNORED
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.data.row_order import rows_to_come
from inplace_ttt.training.loop.batches import collate
from inplace_ttt.training.recipe.recipe import Recipe

from .runs import checkpoint, documents, logged, recipe_file, trained, weights

SPLITS = {
    "two micro-steps": (),
    "two processes, ZeRO 1": ("parallel.nproc_per_node=2", "training.gradient_accumulation_steps=1"),
    "two processes, ZeRO 2, recomputed": (
        "parallel.nproc_per_node=2",
        "training.gradient_accumulation_steps=1",
        "deepspeed=2",
        "training.gradient_checkpointing=true",
    ),
    "two processes, ZeRO 3": (
        "parallel.nproc_per_node=2",
        "training.gradient_accumulation_steps=1",
        "deepspeed=3",
    ),
    "two processes, ZeRO 3, offloaded": (
        "parallel.nproc_per_node=2",
        "training.gradient_accumulation_steps=1",
        "deepspeed={zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}}",
    ),
    "two ranks share rows": ("parallel.nproc_per_node=2", "parallel.sequence_parallel_size=2"),
    "two ranks share rows, ZeRO 3, recomputed": (
        "parallel.nproc_per_node=2",
        "parallel.sequence_parallel_size=2",
        "deepspeed=3",
        "training.gradient_checkpointing=true",
    ),
    "four ranks share rows": ("parallel.nproc_per_node=4", "parallel.sequence_parallel_size=4"),
    "two pairs share rows": (
        "parallel.nproc_per_node=4",
        "parallel.sequence_parallel_size=2",
        "training.gradient_accumulation_steps=1",
    ),
}


# the tokenizer adds one token
ON_THE_GRID = tuple(16 * chunks - 1 for chunks in (4, 2, 9, 1, 19, 5, 3, 8, 16, 7, 12, 6))
HELD_OUT = (127, 15, 63, 47, 31, 95)  # three rows, the last of them not full


@dataclass(frozen=True)
class Run:
    """evaluation: held-out loss and accuracy, means over all tokens of all rows."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    evaluation: dict[str, float]


def splittable(folder: Path) -> Path:
    """Documents that start on chunk borders by themselves, so that rows are packed alike with and without
    shared rows."""
    data = {"validation": str(documents(folder / "held", HELD_OUT))}
    return recipe_file(
        folder, checkpoint(folder / "model"), documents(folder / "text", ON_THE_GRID), data=data
    )


Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def on_labels(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the targets of a batch."""
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    loss: Tensor = model(**batch, use_cache=False, num_items_in_batch=targets).loss
    return loss


def plain_run(recipe: Recipe, loss_of: Loss = on_labels) -> Run:
    """A recipe's run as a few lines of torch."""
    path, settings = str(recipe.model.path), recipe.training
    data = build_data(recipe, AutoTokenizer.from_pretrained(path), 16)
    rows = rows_to_come(data.train, recipe)
    model = load(path, dtype=torch.float32).train()
    if (window := recipe.model.window) is not None:
        set_attention_window(model, window.size, window.sinks)
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.dim() > 1 and ".ttt." not in name]
    others = [p for name, p in named if p.dim() <= 1 or ".ttt." in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), eps=settings.epsilon)
    losses, norms = [], []
    for step in range(settings.steps or 0):
        batch = collate([rows[2 * step], rows[2 * step + 1]])
        loss = loss_of(model, batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)))
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (0.5 if step == 0 else 0.1 + 0.9 * (1 - (step - 1) / 2))
        optimizer.step()
        optimizer.zero_grad()
    assert data.validation is not None
    evaluation = held_out(model, data.validation, "eval")
    with disable_ttt(model):
        evaluation |= held_out(model, data.validation, "eval_off")
    return Run(losses, norms, model.state_dict(), evaluation)


@torch.no_grad()
def held_out(model: Any, rows: Any, name: str) -> dict[str, float]:
    batch = collate([rows[i] for i in range(len(rows))])
    logits, labels = (
        model.eval()(**batch, use_cache=False).logits[:, :-1].flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
    )
    hits = (logits.argmax(-1) == labels)[labels != IGNORED]
    return {
        f"{name}_loss": cross_entropy(logits, labels).item(),
        f"{name}_accuracy": hits.double().mean().item(),
    }


def agree(recipe: Path, plain: Run, output: Path, settings: Sequence[str]) -> None:
    report, _ = trained(recipe, f"output={output}", "monitor.save_steps=4", *settings)
    torch.testing.assert_close(
        torch.tensor(logged(output, "loss")), torch.tensor(plain.losses), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        torch.tensor(logged(output, "grad_norm")), torch.tensor(plain.norms), rtol=1e-5, atol=1e-5
    )
    assert {name: report["evaluation"][name] for name in plain.evaluation} == pytest.approx(
        plain.evaluation, rel=1e-5
    )
    found = weights(Path(report["output"]))
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, plain.weights[name], rtol=1e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert set(plain.weights) - set(found) <= {"lm_head.weight"}

"""L8 for whole runs: however a recipe is split over processes, stages and micro-steps, it is one run."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from inplace_ttt import load
from inplace_ttt.training.data import build_data
from inplace_ttt.training.recipe import Recipe, load_recipe
from inplace_ttt.training.row_order import rows_to_come
from inplace_ttt.training.trainer import collate

from .runs import checkpoint, documents, finish, logged, recipe_file, start, weights

SPLITS = {
    "two micro-steps": (),
    "two processes, ZeRO 1": ("parallel.processes=2", "optimisation.accumulation=1"),
    "two processes, ZeRO 2, recomputed": (
        "parallel.processes=2",
        "optimisation.accumulation=1",
        "deepspeed=2",
        "optimisation.gradient_checkpointing=true",
    ),
    "two processes, ZeRO 3": ("parallel.processes=2", "optimisation.accumulation=1", "deepspeed=3"),
    "two processes, ZeRO 3, offloaded": (
        "parallel.processes=2",
        "optimisation.accumulation=1",
        "deepspeed={zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}}",
    ),
    "two ranks share rows": ("parallel.processes=2", "parallel.sequence_parallel=2"),
    "two ranks share rows, ZeRO 3, recomputed": (
        "parallel.processes=2",
        "parallel.sequence_parallel=2",
        "deepspeed=3",
        "optimisation.gradient_checkpointing=true",
    ),
    "four ranks share rows": ("parallel.processes=4", "parallel.sequence_parallel=4"),
    "two pairs share rows": ("parallel.processes=4", "parallel.sequence_parallel=2", "optimisation.accumulation=1"),
}


SHARED = tuple(split for split, settings in SPLITS.items() if any("sequence_parallel" in setting for setting in settings))
ON_THE_GRID = tuple(16 * chunks - 1 for chunks in (4, 2, 9, 1, 19, 5, 3, 8, 16, 7, 12, 6))  # the tokenizer adds one token

Run = tuple[list[float], list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that start on chunk borders by themselves, so that rows are packed alike with and without shared rows."""
    folder = tmp_path_factory.mktemp("splits")
    return recipe_file(folder, checkpoint(folder / "model"), documents(folder / "text", ON_THE_GRID))


@pytest.fixture(scope="module")
def plain(recipe: Path) -> Run:
    return plain_run(load_recipe(recipe))


def plain_run(recipe: Recipe) -> Run:
    """Losses, gradient norms and weights of a recipe's run as a few lines of torch."""
    path, settings = str(recipe.model.path), recipe.optimisation
    data = build_data(recipe, AutoTokenizer.from_pretrained(path), 16)
    rows = rows_to_come(data.train, recipe)
    model = load(path, dtype=torch.float32).train()
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.dim() > 1 and ".ttt." not in name]
    others = [p for name, p in named if p.dim() <= 1 or ".ttt." in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), eps=settings.epsilon)
    losses, norms = [], []
    for step in range(settings.steps or 0):
        batch = collate([rows[2 * step], rows[2 * step + 1]])
        loss = model(**batch, use_cache=False, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum()).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)))
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (0.5 if step == 0 else 0.1 + 0.9 * (1 - (step - 1) / 2))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_is_the_same_run(split: str, recipe: Path, plain: Run, tmp_path: Path) -> None:
    agree(recipe, plain, tmp_path / "out", SPLITS[split])


@pytest.mark.parametrize("ranks", [2, 4])
def test_odd_documents_across_ranks(ranks: int, recipe: Path, tmp_path: Path) -> None:
    """Documents of any length, which the packer sets on the chunk grid."""
    settings = (f"parallel.processes={ranks}", f"parallel.sequence_parallel={ranks}", f"data.train={documents(tmp_path / 'text')}")
    agree(recipe, plain_run(load_recipe(recipe, [*settings, "monitor.save_every=4"])), tmp_path / "out", settings)


def agree(recipe: Path, plain: Run, output: Path, settings: Sequence[str]) -> None:
    report, _ = finish(start(recipe, f"output={output}", "monitor.save_every=4", *settings))
    losses, norms, expected = plain
    torch.testing.assert_close(torch.tensor(logged(output, "loss")), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(logged(output, "grad_norm")), torch.tensor(norms), rtol=1e-5, atol=1e-5)
    found = weights(Path(report["output"]))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert set(expected) - set(found) <= {"lm_head.weight"}

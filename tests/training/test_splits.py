"""L8 for whole runs: however a recipe is split over processes, stages and micro-steps, it is one run."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import RIDGE
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, load
from inplace_ttt.surgery import disable_ttt
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.data.row_order import rows_to_come
from inplace_ttt.training.loop.batches import collate
from inplace_ttt.training.recipe.recipe import Recipe, load_recipe

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


SHARED = tuple(
    split for split, settings in SPLITS.items() if any("sequence_parallel" in setting for setting in settings)
)
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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that start on chunk borders by themselves, so that rows are packed alike with and without
    shared rows."""
    folder = tmp_path_factory.mktemp("splits")
    data = {"validation": str(documents(folder / "held", HELD_OUT))}
    return recipe_file(
        folder, checkpoint(folder / "model"), documents(folder / "text", ON_THE_GRID), data=data
    )


@pytest.fixture(scope="module")
def plain(recipe: Path) -> Run:
    return plain_run(load_recipe(recipe))


def plain_run(recipe: Recipe) -> Run:
    """A recipe's run as a few lines of torch."""
    path, settings = str(recipe.model.path), recipe.training
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
    hits = (logits.argmax(-1) == labels)[labels != -100]
    return {
        f"{name}_loss": cross_entropy(logits, labels).item(),
        f"{name}_accuracy": hits.double().mean().item(),
    }


@pytest.fixture(scope="module")
def ridge(recipe: Path) -> tuple[str, Run]:
    """The setting of a model by the rule of the ridge memory, in place of the paper's; its plain run."""
    setting = f"model.path={checkpoint(recipe.parent / 'ridge', RIDGE)}"
    return setting, plain_run(load_recipe(recipe, [setting]))


@pytest.fixture(scope="module")
def gradient(recipe: Path) -> tuple[str, Run]:
    """The same of a model whose targets are loss gradients."""
    setting = f"model.path={checkpoint(recipe.parent / 'gradient', {'target': 'gradient', 'eta': 0.3})}"
    return setting, plain_run(load_recipe(recipe, [setting]))


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_is_the_same_run(split: str, recipe: Path, plain: Run, tmp_path: Path) -> None:
    agree(recipe, plain, tmp_path / "out", SPLITS[split])


@pytest.mark.parametrize(
    "split",
    [
        "two processes, ZeRO 2, recomputed",
        "two ranks share rows, ZeRO 3, recomputed",
        "four ranks share rows",
    ],
)
def test_every_split_is_the_same_run_by_least_squares(
    split: str, recipe: Path, ridge: tuple[str, Run], tmp_path: Path
) -> None:
    setting, plain = ridge
    agree(recipe, plain, tmp_path / "out", (setting, *SPLITS[split]))


@pytest.mark.parametrize(
    "split", [split for split in SPLITS if split not in SHARED and "ZeRO 3" not in split]
)
def test_every_split_is_the_same_run_with_loss_gradients(
    split: str, recipe: Path, gradient: tuple[str, Run], tmp_path: Path
) -> None:
    setting, plain = gradient
    agree(recipe, plain, tmp_path / "out", (setting, *SPLITS[split]))


@pytest.mark.full
@pytest.mark.parametrize(
    "split",
    [
        "two processes, ZeRO 2, recomputed",
        "two processes, ZeRO 3",
        "two ranks share rows, ZeRO 3, recomputed",
    ],
)
def test_every_split_is_the_same_run_by_the_next_token(split: str, recipe: Path, tmp_path: Path) -> None:
    preset = InPlaceTTTConfig.preset("ttt_ntp").to_dict()
    ttt = {name: value for name, value in preset.items() if name not in ("layers", "chunk_size")}
    setting = f"model.path={checkpoint(tmp_path / 'model', ttt)}"
    agree(recipe, plain_run(load_recipe(recipe, [setting])), tmp_path / "out", (setting, *SPLITS[split]))


def test_a_stream_is_the_same_run(recipe: Path, tmp_path: Path) -> None:
    """As the recipes for GPUs read: the first process hands out every row. Taken up from a checkpoint it goes
    on, bit for bit."""
    settings = ("parallel.nproc_per_node=2", "training.gradient_accumulation_steps=1", "data.shuffle=false")
    streamed, out = (*settings, "data.streaming=true", "monitor.save_steps=2"), tmp_path / "out"
    agree(recipe, plain_run(load_recipe(recipe, settings)), out, streamed)
    whole = weights(out / "final")
    assert json.loads((out / "checkpoint-2" / "rows.json").read_text())["rows"] == 4
    for later in ("final", "checkpoint-3"):
        shutil.rmtree(out / later)
    report, _ = trained(recipe, f"output={out}", *streamed)
    assert report["resumed_from"] == str(out / "checkpoint-2")
    resumed = weights(out / "final")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_micro_steps_add_up_in_float32(stage: int, recipe: Path, tmp_path: Path) -> None:
    """The norm of four micro-steps' bfloat16 gradients, summed in float32; each sum in bfloat16 would lose up
    to 2⁻⁹ of itself."""
    settings = (
        "model.dtype=bfloat16",
        "training.gradient_accumulation_steps=4",
        "training.steps=1",
        f"deepspeed={stage}",
    )
    trained(recipe, f"output={tmp_path}/out", "monitor.eval_steps=0", *settings)
    given = load_recipe(recipe, settings)
    data = build_data(given, AutoTokenizer.from_pretrained(str(given.model.path)), 16)
    rows, model = rows_to_come(data.train, given), load(str(given.model.path), dtype=torch.bfloat16).train()
    batches = [collate([rows[number]]) for number in range(4)]
    targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for batch in batches:
        model(**batch, use_cache=False, num_items_in_batch=targets).loss.backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad
            parameter.grad = None
    norm = torch.stack([total.norm() for total in sums.values()]).norm()
    assert logged(tmp_path / "out", "grad_norm") == pytest.approx([norm.item()], rel=2e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_odd_documents_across_ranks(ranks: int, recipe: Path, tmp_path: Path) -> None:
    """Documents of any length, which the packer sets on the chunk grid."""
    settings = (
        f"parallel.nproc_per_node={ranks}",
        f"parallel.sequence_parallel_size={ranks}",
        f"data.train={documents(tmp_path / 'text')}",
    )
    agree(
        recipe,
        plain_run(load_recipe(recipe, [*settings, "monitor.save_steps=4"])),
        tmp_path / "out",
        settings,
    )


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

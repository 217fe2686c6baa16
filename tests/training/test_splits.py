"""L8 for whole runs: however a recipe is split over processes, stages and micro-steps, it is one run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import RIDGE
from transformers import AutoTokenizer

from inplace_ttt import InPlaceTTTConfig, load
from inplace_ttt.training.data.data import build_data
from inplace_ttt.training.data.row_order import rows_to_come
from inplace_ttt.training.loop.batches import collate
from inplace_ttt.training.recipe.recipe import load_recipe

from .runs import checkpoint, documents, logged, trained, weights
from .split_runs import SPLITS, Run, agree, plain_run, splittable

SHARED = tuple(
    split for split, settings in SPLITS.items() if any("sequence_parallel" in setting for setting in settings)
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return splittable(tmp_path_factory.mktemp("splits"))


@pytest.fixture(scope="module")
def plain(recipe: Path) -> Run:
    return plain_run(load_recipe(recipe))


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
@pytest.mark.sample(3)
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
@pytest.mark.sample(1)
def test_every_split_is_the_same_run_by_least_squares(
    split: str, recipe: Path, ridge: tuple[str, Run], tmp_path: Path
) -> None:
    setting, plain = ridge
    agree(recipe, plain, tmp_path / "out", (setting, *SPLITS[split]))


@pytest.mark.parametrize(
    "split", [split for split in SPLITS if split not in SHARED and "ZeRO 3" not in split]
)
@pytest.mark.sample(1)
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


@pytest.mark.full
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
@pytest.mark.sample(1)
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

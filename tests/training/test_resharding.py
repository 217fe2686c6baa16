"""A run goes on with another number of processes, from a checkpoint that DeepSpeed made universal."""

import functools
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from inplace_ttt.errors import InPlaceTTTError

from .forked import Forked
from .recipes import tiny_recipe
from .runs import checkpoint, documents, recipe_file, trained, weights

UNIVERSAL = "deepspeed={zero_optimization: {stage: 2}, checkpoint: {load_universal: true}}"


def test_two_processes_go_on_as_one(tmp_path: Path) -> None:
    """With as many rows a step; the optimizer's state and the rows to come are those of the run that was not
    stopped."""
    training = {"steps": 4, "learning_rate": 1e-2}
    recipe = recipe_file(
        tmp_path, checkpoint(tmp_path / "model"), documents(tmp_path / "text"), training=training, deepspeed=2
    )
    two = (
        "parallel.nproc_per_node=2",
        "training.gradient_accumulation_steps=1",
        "monitor.save_steps=2",
        "data.streaming=true",
    )
    trained(recipe, *two)
    out = tmp_path / "out"
    whole = weights(out / "final")
    for later in ("final", "checkpoint-4"):
        shutil.rmtree(out / later)
    code, log = Forked(
        functools.partial(make_universal, str(out / "checkpoint-2" / "global_step2")), [{}]
    ).wait()
    assert code == 0, log
    report, _ = trained(recipe, "training.gradient_accumulation_steps=2", "data.streaming=true", UNIVERSAL)
    assert report["resumed_from"] == str(out / "checkpoint-2") and report["steps"] == 4
    for name, tensor in weights(out / "final").items():
        torch.testing.assert_close(
            tensor, whole[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def make_universal(folder: str) -> None:
    """As `python -m deepspeed.checkpoint.ds_to_universal` does."""
    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    main(
        Namespace(
            input_folder=folder,
            output_folder=f"{folder}_universal",
            inject_missing_state=True,
            keep_temp_folder=False,
            strict=True,
            **workers,
        )
    )


def test_zero_3_is_refused(tmp_path: Path) -> None:
    """With DeepSpeed 0.19.8 such a run goes on with other weights than the one that was not stopped."""
    with pytest.raises(InPlaceTTTError, match=r"load_universal is exact only under ZeRO 1 and 2"):
        tiny_recipe(
            tmp_path, deepspeed={"zero_optimization": {"stage": 3}, "checkpoint": {"load_universal": True}}
        )

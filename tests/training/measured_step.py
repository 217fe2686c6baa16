"""One process: trains a recipe's model for three steps with torch's AdamW and reads a held-out batch; prints
the peaks of memory."""

import ctypes
import gc
from typing import Any

import torch

from inplace_ttt.ops.benchmark import memory_status, peak_starts_again
from inplace_ttt.training.loop.held_out import held_out_sums
from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe.recipe import Recipe, load_recipe

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def train(recipe: Recipe, steps: int = 3) -> tuple[int, int]:
    """Peaks of the last step, and of an evaluation after it."""
    model = build_model(recipe).train()
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    rows, length = recipe.training.batch_size, recipe.data.sequence_length
    ids = torch.randint(0, model.config.vocab_size, (rows, length))
    # two documents
    positions = torch.cat([torch.arange(length - length // 4), torch.arange(length // 4)])[None].expand(
        rows, -1
    )
    for step in range(steps):
        if step == steps - 1:
            peak_starts_again()
        model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = memory_status("VmHWM")
    peak_starts_again()
    held_out_sums(model.eval(), {"input_ids": ids, "position_ids": positions}, ids)
    return trained, memory_status("VmHWM")


def main(file: str, settings: tuple[str, ...] = ()) -> None:
    """glibc is told to give freed memory back, so that the process holds what its tensors hold."""
    libc: Any = ctypes.CDLL(None)
    assert libc.mallopt(_MMAP_THRESHOLD, 65536) and libc.mallopt(_TRIM_THRESHOLD, 65536)
    train(load_recipe(file, settings), steps=1)  # what libraries take once
    gc.collect()
    before = memory_status("VmRSS")
    trained, evaluated = train(load_recipe(file, settings))
    print("PEAKS", trained - before, evaluated - before)

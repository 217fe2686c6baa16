"""One process: trains a recipe's model for three steps with torch's AdamW, prints the peak memory of the last one.

Run with glibc told to give freed memory back (MALLOC_MMAP_THRESHOLD_), so that the process holds what its tensors hold.
"""

import gc
import sys
from pathlib import Path

import torch

from inplace_ttt.training.model import build_model
from inplace_ttt.training.recipe import Recipe, load_recipe


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def train(recipe: Recipe, steps: int = 3) -> None:
    model = build_model(recipe).train()
    if recipe.optimisation.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    rows, length = recipe.optimisation.batch_size, recipe.data.sequence_length
    ids = torch.randint(0, model.config.vocab_size, (rows, length))
    positions = torch.cat([torch.arange(length - length // 4), torch.arange(length // 4)])[None].expand(rows, -1)  # two documents
    for step in range(steps):
        if step == steps - 1:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    recipe = load_recipe(sys.argv[1])
    train(load_recipe(sys.argv[1], ["data.sequence_length=64", "surgery.chunk_size=16"]))  # what libraries take once
    gc.collect()
    before = status("VmRSS")
    train(recipe)
    print("PEAK", status("VmHWM") - before)

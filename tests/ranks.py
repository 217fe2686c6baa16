"""Several processes of this machine as ranks of one gloo group."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ("torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "inplace_ttt.surgery")
"""Ranks are forked from a process that has these, which are seconds to import."""


def on_ranks(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Call `function(group, *args)` in `ranks` processes; an exception in any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload([*PRELOADED])
        mp.start_processes(_main, (ranks, os.path.join(folder, "store"), function, args), nprocs=ranks, start_method="forkserver")


def _main(rank: int, ranks: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        function(dist.group.WORLD, *args)
    finally:
        dist.destroy_process_group()

"""Several processes of this machine as ranks of one gloo group."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forkserver import FORKSERVER


def on_ranks(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Call `function(group, *args)` in `ranks` processes; an exception in any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _main,
            (ranks, os.path.join(folder, "store"), function, args),
            nprocs=ranks,
            start_method=FORKSERVER.get_start_method(),
        )


def _main(rank: int, ranks: int, store: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        function(dist.group.WORLD, *args)
    finally:
        dist.destroy_process_group()

"""Processes that wait for each other before their group opens."""

import functools
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import TCPStore

from inplace_ttt.errors import InPlaceTTTError, NotSoError
from inplace_ttt.training.arguments import open_group
from inplace_ttt.training.meeting import Meeting
from inplace_ttt.training.recipe import load_recipe

from .forked import Forked
from .recipes import write_recipe
from .runs import environments


def stores(count: int) -> list[TCPStore]:
    """Of processes that give up on the store after half a second."""
    first = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=0.5), wait_for_workers=False)
    others = [TCPStore("127.0.0.1", first.port, None, False, timedelta(seconds=0.5), wait_for_workers=False) for _ in range(count - 1)]
    return [first, *others]


def test_a_wait_is_longer_than_any_time_out() -> None:
    """One process prepares for three times what a store or a group would wait; no other goes on without it, nor gives up."""
    left: dict[int, float] = {}

    def prepare(rank: int, store: TCPStore) -> None:
        with Meeting(store, rank, 3).preparing():
            time.sleep(1.5 if rank == 1 else 0)
        left[rank] = time.perf_counter()

    began = time.perf_counter()
    pairs = list(enumerate(stores(3)))  # held: process 0's store serves the others until the last has left
    threads = [threading.Thread(target=prepare, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(left) == [0, 1, 2] and min(left.values()) - began >= 1.5


@pytest.mark.parametrize("failing", [0, 1])
def test_nobody_waits_for_one_that_failed(failing: int) -> None:
    found: dict[int, BaseException] = {}

    def prepare(rank: int, store: TCPStore) -> None:
        try:
            with Meeting(store, rank, 2).preparing():
                if rank == failing:
                    raise InPlaceTTTError("there is no file x.")
        except InPlaceTTTError as error:
            found[rank] = error

    pairs = list(enumerate(stores(2)))
    threads = [threading.Thread(target=prepare, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert str(found[failing]) == "there is no file x."
    assert isinstance(found[1 - failing], NotSoError)
    assert str(found[1 - failing]) == f"process {failing} of the run cannot start: there is no file x."


def test_the_timeout_is_the_recipes(tmp_path: Path) -> None:
    """Also in the group of its own in which DeepSpeed reduces gradients: one process never comes, and the other says so at once."""
    write_recipe(tmp_path, parallel={"processes": 2, "timeout_minutes": 0.02})
    code, log = Forked(functools.partial(wait_in_deepspeeds_group, str(tmp_path / "tiny.yaml")), environments(2)).wait(60)
    assert code == 3 and "WAITED" in log, log
    assert 1 <= float(log.split("WAITED ")[1].split()[0]) < 10


def wait_in_deepspeeds_group(recipe: str) -> int:
    open_group(Meeting.by_environment(), load_recipe(recipe))
    group = groups._clone_world_group()
    if os.environ["RANK"] == "1":
        time.sleep(60)
    began = time.perf_counter()
    try:
        dist.barrier(group)
    except RuntimeError:
        print("WAITED", time.perf_counter() - began)
        return 3
    return 0
